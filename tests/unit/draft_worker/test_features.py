from typing import Any

import torch

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
    assert scheduler.apply(0, commit((29, ROWS), base_len=7)) == []
    empty = packed(torch.zeros(0, 4))
    assert scheduler.apply(0, commit((30, empty), tokens=0, base_len=9)) == []
    assert drafter.given == [ROWS, None, None, None, None]
    assert (figures.committed_tokens, figures.committed_states) == (8, 2)
    assert figures.malformed_features == 2
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
