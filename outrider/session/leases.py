"""Which sessions run somewhere, so that those whose owner is gone are found.

    outrider:running    sorted set: session id by the time at which its owner was last heard of it,
                        in seconds of Redis's own clock

The set only says where to look: the lease of each session decides, and an entry too many or too
few does no harm. Entries of sessions that do not run any more are dropped by whoever looks.
"""

from collections.abc import Sequence

from outrider.session.record_calls import RecordCalls
from outrider.session.redis import Redis, Script, ScriptCall

RUNNING_KEY = "outrider:running"
# Sessions that are looked at in one round.
MOST_A_ROUND = 200

NOTE = Script(
    """
local now = redis.call('TIME')[1]
for _, session_id in ipairs(ARGV) do
  redis.call('ZADD', KEYS[1], now, session_id)
end
return #ARGV
"""
)
# ARGV: seconds, how many.
SILENT = Script(
    """
local latest = redis.call('TIME')[1] - ARGV[1]
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', latest, 'LIMIT', 0, ARGV[2])
"""
)


def note_running(session_ids: Sequence[str]) -> ScriptCall:
    """Say that their owner has these sessions."""
    return ScriptCall(NOTE, [RUNNING_KEY], list(session_ids))


async def pause_orphans(redis: Redis, calls: RecordCalls, *, grace_s: float) -> list[str]:
    """Pause the sessions that nobody has had a lease on for `grace_s`; their ids.

    Nothing else is done to them: a client can resume one before and after, and an owner that was
    only slow finds its epoch still there and goes on.

    Raises:
        RecordsUnavailableError: Redis does not answer.
    """
    silent_s = int(calls.lifetimes.lease_s + grace_s)
    found = await redis.run(SILENT, [RUNNING_KEY], [silent_s, MOST_A_ROUND])
    session_ids = [name.decode() for name in found]
    if not session_ids:
        return []
    replies = await redis.run_all([calls.pause_orphan(name) for name in session_ids])
    paused: list[str] = []
    over: list[str] = []
    for session_id, reply in zip(session_ids, replies, strict=True):
        if isinstance(reply, Exception):
            continue
        if reply[0] == b"ok":
            paused.append(session_id)
        if reply[0] != b"held":
            over.append(session_id)
    if over:
        await redis.command("ZREM", RUNNING_KEY, *over)
    return paused
