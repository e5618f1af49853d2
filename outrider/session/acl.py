"""What each part may do in Redis: its commands, and the keys that it may touch with them.

Each part is a user of Redis. Workers run no scripts: they write what they say about themselves and
read what they are told. Rights on several kinds of keys are separate selectors, so that a command
that is meant for one kind is no good for another.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.session.leases import RUNNING_KEY
from outrider.session.names import PROBE_KEY, session_keys
from outrider.session.policy import POLICY_KEY
from outrider.session.prefixes import PREFIX_KEYS
from outrider.session.registry import Pool, index_key, worker_key

# What every connection begins with, and transactions, which touch no key by themselves.
_CONNECTING = ("ping", "select", "client|setinfo", "multi", "exec")
_SCRIPTS = ("eval", "evalsha", "script|load")


@dataclass(frozen=True, slots=True)
class Rights:
    """Commands, as Redis's ACL names them, on keys by pattern; `read_only` as far as they go."""

    commands: Sequence[str]
    keys: Sequence[str] = ()
    read_only: bool = False

    @property
    def words(self) -> list[str]:
        """The words of a rule."""
        mark = "%R~" if self.read_only else "~"
        return [*(f"+{name}" for name in self.commands), *(f"{mark}{key}" for key in self.keys)]


def _announcing(pool: Pool) -> tuple[Rights, ...]:
    """What a worker says of itself, and is told."""
    return (
        Rights(("hset", "hget", "pexpire", "del"), (worker_key(pool, "*"),)),
        Rights(("sadd", "srem"), (index_key(pool),)),
    )


_EVERY_WORKER = tuple(worker_key(pool, "*") for pool in Pool)
_EVERY_INDEX = tuple(map(index_key, Pool))
_SESSIONS = session_keys("*")

RIGHTS: dict[str, tuple[Rights, ...]] = {
    "coordinator": (
        Rights(
            # The keys of a script are given to it, and its commands are checked one by one.
            (*_CONNECTING, *_SCRIPTS),
            (*_SESSIONS, RUNNING_KEY, POLICY_KEY, PROBE_KEY, *_EVERY_WORKER, *_EVERY_INDEX),
        ),
        Rights(
            ("hset", "hget", "hmget", "hgetall", "hincrby", "exists", "del", "pexpire"),
            _SESSIONS,
        ),
        Rights(("get", "set", "append", "strlen"), (*_SESSIONS, PROBE_KEY)),
        Rights(("time", "zadd", "zrangebyscore", "zrem"), (RUNNING_KEY,)),
        Rights(("hget", "hmget", "hset", "exists"), (POLICY_KEY,)),
        Rights(("hget", "hset", "hgetall", "exists"), _EVERY_WORKER),
        Rights(("smembers", "srem"), _EVERY_INDEX),
        Rights(("zrange",), (PREFIX_KEYS,), read_only=True),
    ),
    "verify-worker": (
        Rights(_CONNECTING),
        *_announcing(Pool.VERIFY),
        Rights(("zadd", "zrem", "zremrangebyscore", "pexpire"), (PREFIX_KEYS,)),
    ),
    "draft-worker": (Rights(_CONNECTING), *_announcing(Pool.DRAFT)),
    # `outrider policy`.
    "operator": (
        Rights((*_CONNECTING, *_SCRIPTS, "hget", "hmget", "hset", "exists"), (POLICY_KEY,)),
    ),
}


def user_name(part: str) -> str:
    """The name of a part's user."""
    return f"outrider-{part}"


def rules(part: str, password: str = "") -> list[str]:
    """The words that make a user, as `ACL SETUSER` and an ACL file take them.

    Only a hash of the password is in them; without one the user can't log in before one is set.
    """
    first, *others = RIGHTS[part]
    secret = [f"#{hashlib.sha256(password.encode()).hexdigest()}"] if password else []
    selectors = [f"({' '.join(rights.words)})" for rights in others]
    base = ["reset", "on", *secret, "resetkeys", "resetchannels", "-@all"]
    return [*base, *first.words, *selectors]


def acl_line(part: str, password: str = "") -> str:
    """The line of an ACL file that makes the user of a part."""
    return f"user {user_name(part)} {' '.join(rules(part, password))}"
