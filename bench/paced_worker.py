"""A verify worker whose steps take at least a set time, as those of a large model do.

`python -m bench.paced_worker SECONDS FLAGS…` is `python -m verify_worker FLAGS…`, but each step
lasts SECONDS or longer. The time is slept, so that a tiny model on few cores can stand for
a large one on its own machine.
"""

import runpy
import sys
import time
from collections.abc import Sequence
from unittest import mock

from verify_worker.runner import Runner
from verify_worker.state import Outcome, Plan


def pace(seconds: float) -> None:
    """Make every step of this process take that long."""
    right = Runner.run

    def paced(self: Runner, plan: Plan) -> Outcome:
        outcome = right(self, plan)
        time.sleep(max(0.0, seconds - outcome.compute_s))
        return Outcome(outcome.results, max(seconds, outcome.compute_s))

    mock.patch.object(Runner, "run", paced).start()


def paced(names: Sequence[str], seconds: float) -> dict[str, Sequence[str]]:
    """Stand-ins of a `bench.cluster.Cluster` for these verify workers; none for 0 seconds."""
    return {name: ("bench.paced_worker", str(seconds)) for name in names if seconds}


def main(seconds: float, flags: Sequence[str]) -> None:
    """Become the paced worker."""
    pace(seconds)
    sys.argv = ["verify_worker", *flags]
    runpy.run_module("verify_worker", run_name="__main__")


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
