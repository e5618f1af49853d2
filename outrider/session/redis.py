"""The only module that speaks to Redis (or Valkey): commands, transactions and scripts.

Every command has a time limit and none is sent twice: a command that failed may or may not
have been carried out, and only its caller knows whether it can be said again. A command
whose caller is cancelled still runs to its end by itself, so that its reply never waits on
a connection for the next caller. When every connection is in use, commands wait in turn.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import redis.asyncio as redis_asyncio
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from outrider.errors import ConfigError, RecordsUnavailableError

Value: TypeAlias = str | bytes | int
T = TypeVar("T")
# What says that idle connections are no good either: the server went away, or the primary
# has moved, and connecting again asks the name for its address anew.
CONNECT_AGAIN = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError)


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script that Redis runs as one step."""

    source: str

    @property
    def sha(self) -> str:
        """The name by which Redis remembers the script."""
        return hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


class Redis:
    """A client of one Redis server; replies are bytes. Made by `connect`.

    Every method raises `RecordsUnavailableError` when Redis does not answer within the time
    limits or refuses the command.
    """

    def __init__(self, client: redis_asyncio.Redis) -> None:
        self._client = client
        # redis-py leaves it without types.
        self._execute: Callable[..., Awaitable[Any]] = client.execute_command
        self._running: set[asyncio.Task[Any]] = set()

    async def ping(self) -> None:
        """Make sure that Redis answers."""
        await self.command("PING")

    async def command(self, *words: Value) -> Any:
        """The reply to one command."""
        return await self._finish(self._command(*words))

    async def transaction(self, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """The replies to several commands that Redis carries out as one step."""
        return await self._finish(self._pipeline(commands, transaction=True))

    async def batch(self, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """The replies to several commands that are sent at once."""
        return await self._finish(self._pipeline(commands, transaction=False))

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Value] = ()) -> Any:
        """The reply of a script."""
        return await self._finish(self._run(script, keys, args))

    async def close(self) -> None:
        """Let the commands under way end and close the connections."""
        if self._running:
            await asyncio.wait(self._running)
        await self._client.aclose()

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, which goes on when the waiting is cancelled."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be left to read it

    async def _command(self, *words: Value) -> Any:
        try:
            return await self._execute(*words)
        except exceptions.RedisError as error:
            raise await self._unavailable(error) from error

    async def _pipeline(self, commands: Sequence[Sequence[Value]], *, transaction: bool) -> Any:
        if not commands:
            return []
        pipeline = self._client.pipeline(transaction=transaction)
        try:
            for words in commands:
                pipeline.execute_command(*words)
            return await pipeline.execute()
        except exceptions.RedisError as error:
            raise await self._unavailable(error) from error
        finally:
            await pipeline.reset()  # type: ignore[no-untyped-call]  # redis-py leaves it untyped

    async def _run(self, script: Script, keys: Sequence[str], args: Sequence[Value]) -> Any:
        tail = (len(keys), *keys, *args)
        try:
            return await self._execute("EVALSHA", script.sha, *tail)
        except exceptions.NoScriptError:
            return await self._command("EVAL", script.source, *tail)
        except exceptions.RedisError as error:
            raise await self._unavailable(error) from error

    async def _unavailable(self, error: exceptions.RedisError) -> RecordsUnavailableError:
        if isinstance(error, CONNECT_AGAIN):
            await self._client.connection_pool.disconnect(inuse_connections=False)
        return RecordsUnavailableError(
            f"Redis does not answer: {error}; check --redis-url and that the server is up"
        )


@asynccontextmanager
async def connect(
    url: str, *, timeout_s: float = 2.0, max_connections: int = 32
) -> AsyncIterator[Redis]:
    """A client of the server at `url`, such as redis://host:6379/0; it connects when used.

    `timeout_s` limits connecting, sending, the reply, and the wait for a free connection,
    each.

    Raises:
        ConfigError: the URL can't be one of Redis.
    """
    try:
        pool = redis_asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise ConfigError(f"--redis-url {url!r} is not a Redis address: {error}") from error
    client = Redis(redis_asyncio.Redis.from_pool(pool))
    try:
        yield client
    finally:
        await client.close()
