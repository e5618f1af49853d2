"""The scripts that write session records: each one step of Redis, on the keys of one session.

The keys are those of `outrider.session.names.session_keys`, in that order: the record, the token
log, the log-probabilities beside it, and the lease, which `APPEND` does without. A
write to a session that exists names the owner and the epoch under which its writer holds it, and
an append the length that it continues; what does not fit is refused with what was found instead.
The replies are lists, a verdict and what was found; the two writes that tokens come with reply 1
when they were carried out.
"""

from outrider.session.redis import Script

# ARGV: ttl ms, lease ms (0: no lease), owner, tokens, logprobs, then fields and values.
CREATE = Script(
    """
if redis.call('EXISTS', KEYS[1]) == 1 then
  return {'exists', ''}
end
redis.call('HSET', KEYS[1], unpack(ARGV, 6))
redis.call('SET', KEYS[2], ARGV[4])
redis.call('DEL', KEYS[3], KEYS[4])
if ARGV[5] ~= '' then
  redis.call('SET', KEYS[3], ARGV[5])
  redis.call('PEXPIRE', KEYS[3], ARGV[1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[1])
if ARGV[2] ~= '0' then
  redis.call('SET', KEYS[4], ARGV[3], 'PX', ARGV[2])
end
return {'ok', ''}
"""
)

# What a write to a session that exists begins with. ARGV: owner and epoch held.
_HELD = """
local call = redis.call
local owner, epoch, state = unpack(call('HMGET', KEYS[1], 'owner', 'epoch', 'state'))
if epoch ~= ARGV[2] then
  if not epoch then
    return {'unknown', ''}
  end
  return {'epoch', epoch}
end
if owner ~= ARGV[1] then
  return {'owner', owner}
end
"""

# ARGV: owner and epoch held, bytes of the log before, tokens, figures, logprobs. The one that is
# run for every token, so it makes no call that it can do without. A paused session runs on by
# this: as long as owner and epoch are the writer's, nobody else has had it.
APPEND = Script(
    _HELD
    + """
if state ~= 'running' then
  if state == 'finished' then
    return {'state', state}
  end
  call('HSET', KEYS[1], 'state', 'running')
end
local length = call('STRLEN', KEYS[2])
if length ~= tonumber(ARGV[3]) then
  return {'base_len', tostring(length / 4)}
end
call('APPEND', KEYS[2], ARGV[4])
if ARGV[6] ~= '' then
  call('APPEND', KEYS[3], ARGV[6])
end
call('HSET', KEYS[1], 'figures', ARGV[5])
return 1
"""
)

# ARGV: owner and epoch held, state afterwards, ttl ms (0: times stay as they are), lease ms,
# base_len, tokens, logprobs, then fields and values. A paused session runs on by this too.
UPDATE = Script(
    _HELD
    + """
if state == 'finished' then
  if ARGV[3] == 'finished' and ARGV[7] == '' then
    return 1
  end
  return {'state', state}
end
if ARGV[7] ~= '' then
  local length = call('STRLEN', KEYS[2]) / 4
  if length ~= tonumber(ARGV[6]) then
    return {'base_len', tostring(length)}
  end
  call('APPEND', KEYS[2], ARGV[7])
  if ARGV[8] ~= '' then
    call('APPEND', KEYS[3], ARGV[8])
  end
end
if state ~= ARGV[3] then
  call('HSET', KEYS[1], 'state', ARGV[3])
end
if #ARGV > 8 then
  call('HSET', KEYS[1], unpack(ARGV, 9))
end
if ARGV[4] ~= '0' then
  call('PEXPIRE', KEYS[1], ARGV[4])
  call('PEXPIRE', KEYS[2], ARGV[4])
  call('PEXPIRE', KEYS[3], ARGV[4])
  if ARGV[3] == 'running' then
    call('SET', KEYS[4], call('HGET', KEYS[1], 'owner'), 'PX', ARGV[5])
  else
    call('DEL', KEYS[4])
  end
end
return 1
"""
)

# What a writer asks after a write whose answer was lost.
POSITION = Script(
    """
local found = redis.call(
  'HMGET', KEYS[1], 'owner', 'epoch', 'state', 'finish_reason', 'draft_worker_id')
if not found[2] then
  return {}
end
found[6] = redis.call('STRLEN', KEYS[2]) / 4
return found
"""
)

# ARGV: owner, tenant, ttl ms, lease ms. A finished session is read and left as it is.
TAKE_OVER = Script(
    """
local tenant, state = unpack(redis.call('HMGET', KEYS[1], 'tenant', 'state'))
if not state or tenant ~= ARGV[2] then
  return {}
end
if state ~= 'finished' then
  redis.call('HINCRBY', KEYS[1], 'epoch', 1)
  redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'state', 'running')
  redis.call('SET', KEYS[4], ARGV[1], 'PX', ARGV[4])
  for i = 1, 3 do
    redis.call('PEXPIRE', KEYS[i], ARGV[3])
  end
end
return {redis.call('HGETALL', KEYS[1]), redis.call('GET', KEYS[2]), redis.call('GET', KEYS[3])}
"""
)

# ARGV: tenant, ttl ms. Whoever runs the session is fenced by the epoch.
CANCEL = Script(
    """
local tenant, state = unpack(redis.call('HMGET', KEYS[1], 'tenant', 'state'))
if not state or tenant ~= ARGV[1] then
  return {'unknown', ''}
end
if state == 'finished' then
  return {'state', state}
end
redis.call('HINCRBY', KEYS[1], 'epoch', 1)
redis.call('HSET', KEYS[1], 'state', 'finished', 'finish_reason', 'cancelled')
redis.call('DEL', KEYS[4])
for i = 1, 3 do
  redis.call('PEXPIRE', KEYS[i], ARGV[2])
end
return {'ok', ''}
"""
)

# ARGV: ttl ms. Owner and epoch stay, so that an owner that was only slow can go on.
PAUSE_ORPHAN = Script(
    """
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'running' then
  return {'state', state or ''}
end
if redis.call('EXISTS', KEYS[4]) == 1 then
  return {'held', ''}
end
redis.call('HSET', KEYS[1], 'state', 'paused')
for i = 1, 3 do
  redis.call('PEXPIRE', KEYS[i], ARGV[1])
end
return {'ok', ''}
"""
)
