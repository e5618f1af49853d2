"""Workers with a deliberate fault in their arithmetic: the test of the tests.

`python -m bench.wrong_worker FAULT FLAGS…` is the worker that has the fault, with its own
flags; a `LocalStack` starts it in the place of the right one with `WrongCommands`.
"""

import runpy
import sys
from collections.abc import Callable, Sequence
from unittest import mock

import torch

from outrider.local.commands import Commands, StackSettings
from outrider.messages import SparseDistribution

# What the untruncated-q drafter samples from: the best tokens of the q that it reports.
SAMPLED_TOP = 3


class WrongCommands(Commands):
    """The commands of a stack in which one kind of worker has the fault."""

    def __init__(self, settings: StackSettings, fault: str) -> None:
        super().__init__(settings)
        self._fault = fault

    def verify_worker(self, redis_url: str, worker_id: str) -> list[str]:
        """A right one, or the one with the fault."""
        return self._with_fault(super().verify_worker(redis_url, worker_id), "verify_worker")

    def draft_worker(self, redis_url: str, worker_id: str) -> list[str]:
        """A right one, or the one with the fault."""
        return self._with_fault(super().draft_worker(redis_url, worker_id), "draft_worker")

    def _with_fault(self, command: list[str], module: str) -> list[str]:
        if FAULTS[self._fault][0] != module:
            return command
        python, flags = command[0], command[command.index(module) + 1 :]
        return [python, "-m", "bench.wrong_worker", self._fault, *flags]


def softmax_residual() -> None:
    """A rejected token is replaced from softmax(max(p - q, 0)) instead of its normalisation."""
    from outrider.sampling import rejection

    def wrong(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p - q).clamp_min(0.0).softmax(-1)

    mock.patch.object(rejection, "residual", wrong).start()


def untruncated_q() -> None:
    """A drafter that samples from its best few tokens and reports q as it was before."""
    from outrider.drafting import turns
    from outrider.sampling import proposal

    def whole(p: torch.Tensor, top: int) -> SparseDistribution:
        return proposal.quantised(p, 0)

    def truncated_draw(q: SparseDistribution, seed: int, position: int) -> int:
        cut = SparseDistribution(q.token_ids[:SAMPLED_TOP], q.weights[:SAMPLED_TOP])
        return proposal.draw(cut, seed, position)

    mock.patch.object(turns, "quantised", whole).start()
    mock.patch.object(turns, "draw", truncated_draw).start()


def always_accept() -> None:
    """Every draft token is accepted, whatever the target says."""
    from outrider.sampling.acceptance import TargetTokens, Verdict, verdict, verify_tree
    from verify_worker import runner

    def wrong(draft: Sequence[int], parents: Sequence[int], targets: TargetTokens) -> Verdict:
        last = targets[len(draft)]
        return verify_tree(draft, parents, targets) if last is None else whole(draft, last)

    def whole(draft: Sequence[int], last: int) -> Verdict:
        return verdict(draft, last, len(draft), whole=True)

    mock.patch.object(runner, "verify_tree", wrong).start()


# fault: (the worker that has it, what makes it)
FAULTS: dict[str, tuple[str, Callable[[], None]]] = {
    "softmax-residual": ("verify_worker", softmax_residual),
    "untruncated-q": ("draft_worker", untruncated_q),
    "always-accept": ("verify_worker", always_accept),
}


def main(fault: str, flags: Sequence[str]) -> None:
    """Become the worker with the fault."""
    module, make_wrong = FAULTS[fault]
    make_wrong()
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
