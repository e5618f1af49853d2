"""A call in a thread that nobody has to wait for, however long it takes."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """What it gives; the process may end before it does, unlike with the threads of a pool.

    Who has cancelled what comes back hears no more of it; the call goes on.
    """
    done: Future[T] = Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(call())
        except BaseException as fault:
            done.set_exception(fault)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return asyncio.wrap_future(done)
