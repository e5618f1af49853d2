"""A call in a thread that nobody has to wait for, however long it takes."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin(call: Callable[[], T], *, stays: bool = False) -> Future[T]:
    """What it will give; the process may end before it does, unlike with the threads of a pool.

    A thread that `stays` does so when the call has ended: processes that it has started may be
    told to end with it.
    """
    done: Future[T] = Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(call())
        except BaseException as fault:
            done.set_exception(fault)
        if stays:
            threading.Event().wait()

    threading.Thread(target=run, name="loading", daemon=True).start()
    return done


def in_thread(call: Callable[[], T], *, stays: bool = False) -> asyncio.Future[T]:
    """`begin`, for the event loop.

    Who has cancelled what comes back hears no more of it; the call goes on.
    """
    return asyncio.wrap_future(begin(call, stays=stays))
