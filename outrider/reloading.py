"""Files that may change while a process runs: the last good content of them is what counts.

Whoever needs the content asks for it each time, which costs a look at the files' times. Files that
are half written, or do not fit each other, are told once in the log and read again the next
time; until they are good, what was read before goes on.
"""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from outrider import logs
from outrider.errors import ConfigError

T = TypeVar("T")
# Of each file: when it was written, how long it is, and which one it is.
Marks = tuple[tuple[int, int, int] | None, ...]


class Reloaded(Generic[T]):
    """What `read` makes of `paths`; threads may share it.

    `read` raises `ConfigError` for content that is no good. `what` names it in the log.

    Raises:
        ConfigError: the first content is no good.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], T], *, what: str) -> None:
        self._paths = [os.path.expanduser(path) for path in paths]
        self._read = read
        self._what = what
        self._log = logs.get(__name__)
        self._lock = threading.Lock()
        self._marks = self._look()
        self._content = read()
        # How often other content was read; whoever made something of it can tell whether to again.
        self._generation = 0
        self._complained = False

    def get(self) -> T:
        """The content as of now, or the last that was good."""
        return self.versioned()[1]

    def versioned(self) -> tuple[int, T]:
        """The content with a number that rises whenever other content was read."""
        with self._lock:
            marks = self._look()
            if marks != self._marks:
                self._read_again(marks)
            return self._generation, self._content

    def _read_again(self, marks: Marks) -> None:
        try:
            content = self._read()
        except ConfigError as error:
            if not self._complained:
                self._log.warning(
                    f"{self._what} can't be used; going on with the last good one",
                    error=error.message,
                )
            self._complained = True
            return
        if marks != self._look():
            return  # somebody writes right now; the next one who asks reads all of it
        self._marks, self._content = marks, content
        self._generation += 1
        self._complained = False
        self._log.info(f"{self._what} was read again", files=self._paths)

    def _look(self) -> Marks:
        return tuple(map(_mark, self._paths))


def _mark(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def read_file(path: str, flag: str) -> bytes:
    """The content of a file.

    Raises:
        ConfigError: it can't be read; names the flag that names the file.
    """
    try:
        with open(os.path.expanduser(path), "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"can't read {flag} {path}: {error.strerror}") from error
