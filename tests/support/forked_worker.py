"""A verify worker whose other ranks are plain processes, which start sooner than those of Ray.

`python -m tests.support.forked_worker FLAGS…` is `python -m verify_worker FLAGS…` with such ranks.
"""

import runpy
from unittest import mock

from outrider.local.commands import Commands
from tests.support import rank_processes


class ForkedCommands(Commands):
    """The commands of a stack whose verify workers are such."""

    def verify_worker(self, redis_url: str, worker_id: str) -> list[str]:
        """The same flags."""
        python, *others = super().verify_worker(redis_url, worker_id)
        flags = others[others.index("verify_worker") + 1 :]
        return [python, "-m", "tests.support.forked_worker", *flags]


def main() -> None:
    """Become the worker; what the other ranks need is imported beside it while it starts."""
    rank_processes.begin()
    from tests.support.ranks import ForkedRanks
    from verify_worker import app

    mock.patch.object(app, "open_ranks", return_value=ForkedRanks()).start()
    runpy.run_module("verify_worker", run_name="__main__")


if __name__ == "__main__":
    main()
