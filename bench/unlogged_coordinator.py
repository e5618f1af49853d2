"""A coordinator that keeps no log: what the log costs is what it is faster by.

`python -m bench.unlogged_coordinator FLAGS…` is `python -m coordinator FLAGS…`, but after it has
recorded a session it says nothing more about it to Redis: no tokens, no lease, no end.
"""

import runpy
import sys
from collections.abc import Sequence
from unittest import mock

from coordinator.journal import Journal
from coordinator.log_writer import LogWriter


def unlog() -> None:
    """Make every writer of this process forget what it is given, but for new sessions."""

    async def write(self: LogWriter, journal: Journal) -> None:
        """Nobody waits."""

    def later(self: LogWriter, journal: Journal) -> None:
        if not journal.runs:
            right(self, journal)

    right = LogWriter.later
    mock.patch.object(LogWriter, "write", write).start()
    mock.patch.object(LogWriter, "later", later).start()


def main(flags: Sequence[str]) -> None:
    """Become the coordinator without a log."""
    unlog()
    sys.argv = ["coordinator", *flags]
    runpy.run_module("coordinator", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
