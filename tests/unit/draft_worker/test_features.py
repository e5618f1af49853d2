from typing import Any

import numpy as np
import pytest
import torch

from draft_worker.features import hidden_of
from draft_worker.figures import Figures
from draft_worker.scheduler import Scheduler
from outrider.drafting.base import HiddenStates
from outrider.drafting.ngram import NgramDrafter
from outrider.messages import CommitDraft, OpenDraft, Proposal, SamplingParams, Tensor
from outrider.model.tensors import packed

READS = HiddenStates(layer=30, size=4)
ROWS = packed(torch.arange(8.0).view(2, 4))


def commit(*features: tuple[int, Tensor], tokens: int = 2, base_len: int = 1) -> CommitDraft:
    return CommitDraft(
        session_id="s",
        epoch=1,
        base_len=base_len,
        token_ids=tuple(range(tokens)),
        draft_len=2,
        features=features,
    )


def test_the_layer_that_is_read_is_taken() -> None:
    other = packed(torch.zeros(2, 4))
    assert hidden_of(commit((29, other), (30, ROWS)), READS) == ROWS
    assert hidden_of(commit((29, other)), READS) is None
    assert hidden_of(commit(), READS) is None
    assert hidden_of(commit((30, ROWS)), None) is None


@pytest.mark.parametrize("shape", [(1, 4), (3, 4), (2, 3), (8,), (2, 4, 1), (0, 4)])
def test_another_shape_is_not(shape: tuple[int, ...]) -> None:
    assert hidden_of(commit((30, packed(torch.zeros(shape)))), READS) is None


def test_nothing_for_no_tokens() -> None:
    assert hidden_of(commit((30, packed(torch.zeros(0, 4))), tokens=0), READS) is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan, None])
def test_numbers_that_are_not_finite_are_not(dtype: str, wrong: float | None) -> None:
    kinds: dict[str, Any] = {"float32": torch.float32, "float16": torch.float16}
    rows = torch.full((2, 4), -6e4)
    if wrong is not None:
        rows[1, 2] = wrong
    kind = kinds.get(dtype, torch.bfloat16)
    data = rows.to(kind).contiguous().view(torch.uint8).numpy().tobytes()
    found = hidden_of(commit((30, Tensor(dtype, (2, 4), data))), READS)
    assert (found is None) == (wrong is not None)


class Reading(NgramDrafter):
    """Reads states, and keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Tensor | None] = []

    @property
    def reads(self) -> HiddenStates:  # type: ignore[override]  # it reads where the other doesn't
        return READS

    def commit(
        self, session_id: str, base_len: int, token_ids: Any, hidden: Tensor | None = None
    ) -> None:
        self.given.append(hidden)
        super().commit(session_id, base_len, token_ids)


def test_a_session_goes_on_with_states_and_without() -> None:
    drafter, figures = Reading(), Figures()
    scheduler = Scheduler(drafter, figures, max_sessions=1)
    opened = OpenDraft(
        session_id="s", epoch=1, token_ids=(9,), sampling=SamplingParams(), draft_len=2
    )
    assert scheduler.apply(0, opened) == []
    assert scheduler.apply(0, commit((30, ROWS))) == []
    assert scheduler.apply(0, commit((30, packed(torch.zeros(1, 4))), base_len=3)) == []
    assert scheduler.apply(0, commit(base_len=5)) == []
    assert drafter.given == [ROWS, None, None]
    assert (figures.committed_tokens, figures.committed_states) == (6, 2)
    ((_, proposal),) = scheduler.answer()
    assert isinstance(proposal, Proposal)
    assert proposal.feature_layers == (30,)


def test_a_drafter_that_reads_nothing_asks_for_nothing() -> None:
    figures = Figures()
    scheduler = Scheduler(NgramDrafter(), figures, max_sessions=1)
    opened = OpenDraft(
        session_id="s", epoch=1, token_ids=(9,), sampling=SamplingParams(), draft_len=2
    )
    scheduler.apply(0, opened)
    scheduler.apply(0, commit((30, ROWS)))
    ((_, proposal),) = scheduler.answer()
    assert isinstance(proposal, Proposal)
    assert proposal.feature_layers == ()
    assert figures.committed_tokens == 0
