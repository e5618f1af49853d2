"""The only module that speaks to Redis (or Valkey): commands, transactions and scripts.

Every command has a time limit and none is sent twice: a command that failed may or may not
have been carried out, or may be only later, and only its caller knows whether it can be said
again. A command whose caller is cancelled, or is told that Redis does not answer, still runs
to its end by itself, so that its reply never waits on a connection for the next caller. When
every connection is in use, commands wait in turn. Batches of scripts take turns on a connection of
their own, which goes with a batch that is cancelled.

After an error that says that the server is gone, or is not the primary any more, no connection
from before it is used again: the next command connects anew, which asks the name for its address
anew, and goes to the next address if several were given.
"""

import asyncio
import hashlib
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import redis.asyncio as redis_asyncio
from hiredis import pack_command
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from outrider.errors import ConfigError, RecordsUnavailableError
from outrider.session.credentials import PasswordFile, with_password_file
from outrider.session.redis_tls import RedisTls, open_contexts, use_tls

Value: TypeAlias = str | bytes | int
T = TypeVar("T")
# What says that the other connections are no good either. A server that is loading its data after
# a start counts as one to which there is no connection.
CONNECT_AGAIN = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError)
WHY_CHARS = 200
# A comma ends an address where another one begins: passwords may have commas.
_BETWEEN_ADDRESSES = re.compile(r",\s*(?=(?:redis|rediss|unix)://)")
_USER_AND_PASSWORD = re.compile(r"//[^/]*@")


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script that Redis runs as one step; `sha` is the name by which it remembers it."""

    source: str
    sha: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the name, once."""
        sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", sha)


class ScriptCall(NamedTuple):
    """A script with its keys and arguments; `packed` is the whole command if it is at hand."""

    script: Script
    keys: Sequence[str]
    args: Sequence[Value] = ()
    packed: bytes = b""


class ScriptHead:
    """A script with keys and first arguments that many calls have in common, packed once.

    `more` arguments follow in each call.
    """

    def __init__(
        self, script: Script, keys: Sequence[str], args: Sequence[Value], *, more: int
    ) -> None:
        self._script, self._keys, self._args = script, keys, args
        words = ("EVALSHA", script.sha, len(keys), *keys, *args)
        _, _, rest = _packed(words).partition(b"\r\n")
        self._packed = b"*%d\r\n%b" % (len(words) + more, rest)

    def call(self, *more: bytes) -> ScriptCall:
        """The call with the other arguments."""
        packed = [self._packed, *[b"$%d\r\n%b\r\n" % (len(word), word) for word in more]]
        return ScriptCall(self._script, self._keys, (*self._args, *more), b"".join(packed))


class _Connections:
    """A client with its pool, a connection for batches of scripts, and how many are at work."""

    def __init__(self, client: redis_asyncio.Redis) -> None:
        self.client = client
        self.users = 0
        # The pool has none of its limit for it: what takes turns needs no other.
        make: Callable[[], redis_asyncio.Connection] = client.connection_pool.make_connection
        self._lane = make()
        self._turn = asyncio.Lock()

    async def exchange(self, packed: bytes, replies: int) -> list[Any]:
        """Send commands and read so many replies; an exception where one was refused.

        A pipeline of redis-py is the same and takes several times as long, which counts where
        tokens wait for it. Whoever is cancelled in here cuts the connection.
        """
        found: list[Any] = []
        async with self._turn:
            lane = self._lane
            try:
                await self.client.connection_pool.ensure_connection(lane)
                await lane.send_packed_command(packed, check_health=False)
                while len(found) < replies:
                    try:
                        found.append(await lane.read_response())
                    except exceptions.ResponseError as refused:
                        found.append(refused)
            except BaseException:
                await lane.disconnect(nowait=True)
                raise
        return found

    async def close(self) -> None:
        """Let the batch under way end and close all of them."""
        async with self._turn:
            await self._lane.disconnect()
        await self.client.aclose()


class Redis:
    """A client of one Redis; replies are bytes. Made by `connect`.

    `open_client` makes a client with fresh connections. Every method raises
    `RecordsUnavailableError` when Redis does not answer within `timeout_s`, or refuses the
    command.
    """

    def __init__(self, open_client: Callable[[], redis_asyncio.Redis], timeout_s: float) -> None:
        self._open_client = open_client
        self._timeout_s = timeout_s
        self._connections = _Connections(open_client())
        self._running: set[asyncio.Task[Any]] = set()

    async def ping(self) -> None:
        """Make sure that Redis answers."""
        await self.command("PING")

    async def command(self, *words: Value) -> Any:
        """The reply to one command."""
        return await self._finish(lambda client: _command(client, *words))

    async def transaction(self, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """The replies to several commands that Redis carries out as one step."""
        return await self._finish(lambda client: _pipeline(client, commands, transaction=True))

    async def batch(self, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """The replies to several commands that are sent at once."""
        return await self._finish(lambda client: _pipeline(client, commands))

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Value] = ()) -> Any:
        """The reply of a script."""
        return await self._finish(lambda client: _run(client, ScriptCall(script, keys, args)))

    async def run_all(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """The replies of several scripts, which are sent at once and run in turn.

        Where Redis refused one of them, its reply is a `RecordsUnavailableError`.
        """
        held = self._connections
        held.users += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                replies = await self._use(held, lambda: _run_all(held, calls))
        except TimeoutError:
            await self._leave(held)
            raise self._silent() from None
        except exceptions.RedisError as error:
            raise _told(error) from error
        return [_told(reply) if isinstance(reply, Exception) else reply for reply in replies]

    async def close(self) -> None:
        """Let the commands under way end and close the connections."""
        if self._running:
            await asyncio.wait(self._running)
        await self._connections.close()

    async def _finish(self, work: Callable[[redis_asyncio.Redis], Awaitable[T]]) -> T:
        """Wait for `work`, which goes on when the waiting ends before it."""
        held = self._connections
        held.users += 1
        task = asyncio.create_task(self._use(held, lambda: work(held.client)))
        self._running.add(task)
        task.add_done_callback(self._forget)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(task)
        except TimeoutError:
            # Its connection is not used again, so what it may still answer meets nobody.
            await self._leave(held)
            task.cancel()
            raise self._silent() from None
        except exceptions.RedisError as error:
            raise _told(error) from error

    def _silent(self) -> RecordsUnavailableError:
        return RecordsUnavailableError(
            f"Redis does not answer within {self._timeout_s:g} s; check --redis-url and "
            "that the server is up"
        )

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be left to read it

    async def _use(self, held: _Connections, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` on the connections, and leave them all if it says that they are bad.

        Whoever calls it has counted a user.
        """
        try:
            result = await work()
            replies = result if isinstance(result, list) else ()
            if any(isinstance(reply, CONNECT_AGAIN) for reply in replies):
                await self._leave(held)
            return result
        except CONNECT_AGAIN:
            await self._leave(held)
            raise
        finally:
            held.users -= 1
            if held is not self._connections:
                await self._close_unused(held)

    async def _leave(self, held: _Connections) -> None:
        """Connect anew, unless that was done since; what is under way there goes on."""
        if held is self._connections:
            self._connections = _Connections(self._open_client())
            await self._close_unused(held)

    async def _close_unused(self, held: _Connections) -> None:
        if not held.users:
            await held.close()


async def _command(client: redis_asyncio.Redis, *words: Value) -> Any:
    # redis-py leaves it without types.
    execute: Callable[..., Awaitable[Any]] = client.execute_command
    return await execute(*words)


async def _pipeline(
    client: redis_asyncio.Redis,
    commands: Sequence[Sequence[Value]],
    *,
    transaction: bool = False,
    raise_on_error: bool = True,
) -> list[Any]:
    if not commands:
        return []
    pipeline = client.pipeline(transaction=transaction)
    try:
        for words in commands:
            pipeline.execute_command(*words)
        return list(await pipeline.execute(raise_on_error=raise_on_error))
    finally:
        await pipeline.reset()  # type: ignore[no-untyped-call]  # redis-py leaves it untyped


async def _run(client: redis_asyncio.Redis, call: ScriptCall) -> Any:
    tail = (len(call.keys), *call.keys, *call.args)
    try:
        return await _command(client, "EVALSHA", call.script.sha, *tail)
    except exceptions.NoScriptError:
        return await _command(client, "EVAL", call.script.source, *tail)


async def _run_all(held: _Connections, calls: Sequence[ScriptCall]) -> list[Any]:
    """The reply to each call; an exception where the script failed."""
    replies = await _scripts(held, calls)
    unknown = [at for at, r in enumerate(replies) if isinstance(r, exceptions.NoScriptError)]
    if unknown:
        # None of these has run.
        sources = {calls[at].script.source for at in unknown}
        await _pipeline(held.client, [("SCRIPT", "LOAD", source) for source in sources])
        again = await _scripts(held, [calls[at] for at in unknown])
        for at, reply in zip(unknown, again, strict=True):
            replies[at] = reply
    return replies


async def _scripts(held: _Connections, calls: Sequence[ScriptCall]) -> list[Any]:
    if not calls:
        return []
    packed = [
        packed or _packed(("EVALSHA", script.sha, len(keys), *keys, *args))
        for script, keys, args, packed in calls
    ]
    return await held.exchange(b"".join(packed), len(packed))


def _packed(words: Sequence[Value]) -> bytes:
    pack: Callable[..., bytes] = pack_command  # its types know of one word only
    return pack(tuple(words))


def _told(error: Exception) -> RecordsUnavailableError:
    """What callers are told of an error of Redis."""
    # redis-py repeats the command, with all that is written.
    why = str(error)[:WHY_CHARS]
    match error:
        case exceptions.OutOfMemoryError():
            said = f"Redis is full: {why}; raise its maxmemory, or have records expire sooner"
        case exceptions.ReadOnlyError():
            said = "Redis is not the primary any more; the next command connects again"
        case exceptions.BusyLoadingError():
            said = "Redis has just started and is loading its data; try again later"
        case exceptions.AuthenticationError() | exceptions.NoPermissionError():
            said = f"Redis refuses this user: {why}; check the user in --redis-url"
        case exceptions.ConnectionError() | exceptions.TimeoutError():
            said = f"Redis does not answer: {why}; check --redis-url and that the server is up"
        case _:
            said = f"Redis refused a command: {why}"
    return RecordsUnavailableError(said)


@asynccontextmanager
async def connect(
    url: str,
    *,
    password_file: str = "",
    tls: RedisTls | None = None,
    timeout_s: float = 2.0,
    max_connections: int = 32,
) -> AsyncIterator[Redis]:
    """A client of the server at `url`, such as redis://host:6379/0; it connects when used.

    `url` may name several servers, separated by commas: a primary and those that may follow it.
    The password in `password_file`, if one is given, is read again for each connection, and so are
    the files of `tls` when they have changed.
    Each command has `timeout_s`, connecting and the wait for a free connection included.

    Raises:
        ConfigError: the URL can't be one of Redis, or a file can't be used.
    """
    contexts = open_contexts(tls)

    def pool_of(one: str, credentials: PasswordFile | None) -> redis_asyncio.BlockingConnectionPool:
        pool = redis_asyncio.BlockingConnectionPool.from_url(
            one,
            credential_provider=credentials,
            max_connections=max_connections,
            timeout=timeout_s,
            # The limit is that of a whole command, see `Redis`; one for each reply costs more.
            socket_timeout=None,
            socket_connect_timeout=timeout_s,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
        )
        use_tls(pool, contexts)
        return pool

    try:
        servers = [with_password_file(one, password_file) for one in _BETWEEN_ADDRESSES.split(url)]
        for server in servers:
            pool_of(*server)
    except ValueError as error:
        shown = _USER_AND_PASSWORD.sub("//***@", url)
        raise ConfigError(f"--redis-url {shown!r} is not a Redis address: {error}") from error
    in_turn = itertools.cycle(servers)
    redis = Redis(lambda: redis_asyncio.Redis.from_pool(pool_of(*next(in_turn))), timeout_s)
    try:
        yield redis
    finally:
        await redis.close()
