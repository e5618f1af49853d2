"""The scripts that write session records: each one step of Redis, on the keys of one session.

Every script has the same keys, in the order of `outrider.session.names.session_keys`: the record,
the token log, the log-probabilities beside it, and the lease. A write to a session that exists
names the owner and the epoch under which its writer holds it, and an append the length that it
continues; what does not fit is refused with what was found instead. The replies are lists: a
verdict and what was found.
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

# ARGV: owner and epoch held, state afterwards, ttl ms (0: times stay as they are), lease ms,
# base_len, tokens, logprobs, then fields and values. A paused session runs on by this: as long as
# owner and epoch are the writer's, nobody else has had it.
UPDATE = Script(
    """
local owner, epoch, state = unpack(redis.call('HMGET', KEYS[1], 'owner', 'epoch', 'state'))
if not epoch then
  return {'unknown', ''}
end
if epoch ~= ARGV[2] then
  return {'epoch', epoch}
end
if owner ~= ARGV[1] then
  return {'owner', owner}
end
if state == 'finished' then
  if ARGV[3] == 'finished' and ARGV[7] == '' then
    return {'ok', ''}
  end
  return {'state', state}
end
if ARGV[7] ~= '' then
  local length = redis.call('STRLEN', KEYS[2]) / 4
  if length ~= tonumber(ARGV[6]) then
    return {'base_len', tostring(length)}
  end
  redis.call('APPEND', KEYS[2], ARGV[7])
  if ARGV[8] ~= '' then
    redis.call('APPEND', KEYS[3], ARGV[8])
  end
end
if state ~= ARGV[3] then
  redis.call('HSET', KEYS[1], 'state', ARGV[3])
end
if #ARGV > 8 then
  redis.call('HSET', KEYS[1], unpack(ARGV, 9))
end
if ARGV[4] ~= '0' then
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
  redis.call('PEXPIRE', KEYS[3], ARGV[4])
  if ARGV[3] == 'running' then
    redis.call('SET', KEYS[4], redis.call('HGET', KEYS[1], 'owner'), 'PX', ARGV[5])
  else
    redis.call('DEL', KEYS[4])
  end
end
return {'ok', ''}
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
