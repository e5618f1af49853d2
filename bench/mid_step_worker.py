"""A verify worker that pauses in the midst of its steps, and hits another rank there.

`python -m bench.mid_step_worker SECONDS FAULT FLAGS…` is `python -m verify_worker FLAGS…`, but
rank 0 sleeps SECONDS between the first and the second sum of a step. By then all ranks run the
step, and the others wait in the second. When there is a file FAULT, "PID SIGNAL", that signal is
sent at the end of the sleep, and the file is removed. What was open when another rank was lost is
logged.
"""

import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from outrider import logs
from outrider.errors import RankLostError
from outrider.model.parallel.group import RankGroup
from outrider.model.parallel.member import Answer, Member
from outrider.model.parallel.messages import Order

# The collective of a step before which rank 0 sleeps.
_HELD = 2
LOST = "lost a rank in mid-step"


class MidStep:
    """Rank 0's steps with a pause in them."""

    def __init__(self, seconds: float, fault: Path) -> None:
        self._seconds, self._fault = seconds, fault
        # What a rank does before its first step is no step.
        self._open, self._steps = _HELD, 0

    def hold(self) -> None:
        """From now on steps of this process pause."""
        run: Any = Member.run
        wait: Any = RankGroup._wait

        def held_run(member: Member, order: Order) -> Answer | None:
            self._steps += 1
            self._open = 0
            try:
                answer: Answer | None = run(member, order)
            except RankLostError as error:
                log = logs.get("bench.mid_step_worker")
                log.info(LOST, step=self._steps, collective=self._open, error=error.message)
                raise
            return answer

        def held_wait(group: RankGroup, start: Callable[[], Any]) -> None:
            self._open += 1
            if self._open == _HELD:
                time.sleep(self._seconds)
                self._hit()
            wait(group, start)

        mock.patch.object(Member, "run", held_run).start()
        mock.patch.object(RankGroup, "_wait", held_wait).start()

    def _hit(self) -> None:
        if self._fault.exists():
            pid, number = map(int, self._fault.read_text().split())
            os.kill(pid, number)
            self._fault.unlink()


def hit_in_mid_step(fault: Path, pid: int, number: int) -> None:
    """Ask the worker that looks at `fault` to send the signal; done when the file is gone."""
    written = fault.with_suffix(".new")
    written.write_text(f"{pid} {number}")
    written.rename(fault)


def main(seconds: float, fault: str, flags: Sequence[str]) -> None:
    """Become the worker."""
    MidStep(seconds, Path(fault)).hold()
    sys.argv = ["verify_worker", *flags]
    runpy.run_module("verify_worker", run_name="__main__")


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3:])
