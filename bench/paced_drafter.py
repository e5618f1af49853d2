"""A draft worker of stated capacity: every token that is asked for takes a set time of it.

`python -m bench.paced_drafter SECONDS FLAGS…` is `python -m draft_worker FLAGS…`, but a call of the
drafter takes SECONDS for each token of each session in it, slept, so that many draft workers on
few cores can stand for as many machines. It drafts 1 / SECONDS tokens a second at most.
"""

import runpy
import sys
import time
from collections.abc import Sequence
from unittest import mock

from draft_worker.scheduler import Key, Scheduler, _Want
from outrider.messages import Draft


def pace(seconds: float) -> None:
    """Make every token of this process take that long."""
    right = Scheduler._propose

    def paced(self: Scheduler, wants: dict[Key, _Want]) -> list[Draft | None]:
        begin = time.monotonic()
        drafts = right(self, wants)
        needed_s = seconds * sum(want.draft_len for want in wants.values())
        time.sleep(max(0.0, begin + needed_s - time.monotonic()))
        return drafts

    mock.patch.object(Scheduler, "_propose", paced).start()


def main(seconds: float, flags: Sequence[str]) -> None:
    """Become the paced worker."""
    pace(seconds)
    sys.argv = ["draft_worker", *flags]
    runpy.run_module("draft_worker", run_name="__main__")


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
