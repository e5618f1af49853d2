from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draft_worker.figures import Figures
from draft_worker.scheduler import MAX_DRAFT_LEN, Addressed, Scheduler
from outrider import telemetry
from outrider.drafting.base import (
    Drafter,
    DraftRequest,
)
from outrider.drafting.suffix import SuffixDrafter
from outrider.messages import (
    CloseDraft,
    CommitDraft,
    Draft,
    DraftFailed,
    OpenDraft,
    Proposal,
    SamplingParams,
)
from tests.support.counting_drafter import CountingDrafter


@pytest.fixture
def drafter() -> CountingDrafter:
    return CountingDrafter()


@pytest.fixture
def figures() -> Figures:
    return Figures()


@pytest.fixture
def scheduler(drafter: CountingDrafter, figures: Figures) -> Scheduler:
    kept: Drafter = drafter
    return Scheduler(kept, figures, max_sessions=3)


def opened(
    session_id: str, *token_ids: int, draft_len: int = 2, epoch: int = 1, traceparent: str = ""
) -> OpenDraft:
    return OpenDraft(
        session_id=session_id,
        epoch=epoch,
        token_ids=token_ids,
        sampling=SamplingParams(),
        draft_len=draft_len,
        traceparent=traceparent,
    )


def committed(
    session_id: str, base_len: int, *token_ids: int, draft_len: int = 2, epoch: int = 1
) -> CommitDraft:
    return CommitDraft(
        session_id=session_id,
        epoch=epoch,
        base_len=base_len,
        token_ids=token_ids,
        draft_len=draft_len,
    )


def closed(session_id: str, epoch: int = 1) -> CloseDraft:
    return CloseDraft(session_id=session_id, epoch=epoch)


def proposals(events: list[Addressed]) -> list[tuple[int, str, int, tuple[int, ...]]]:
    found = []
    for stream, event in events:
        assert isinstance(event, Proposal), event
        found.append((stream, event.session_id, event.base_len, event.draft.token_ids))
    return found


def failures(events: list[Addressed]) -> list[tuple[int, str, str]]:
    found = []
    for stream, event in events:
        assert isinstance(event, DraftFailed), event
        found.append((stream, event.session_id, event.error.reason))
    return found


def test_open_and_commit_are_answered_at_their_length(scheduler: Scheduler) -> None:
    assert scheduler.apply(0, opened("s", 5, 6)) == []
    assert proposals(scheduler.answer()) == [(0, "s", 2, (7, 8))]
    assert not scheduler.has_wants
    assert scheduler.apply(0, committed("s", 2, 7, 20, draft_len=3)) == []
    assert proposals(scheduler.answer()) == [(0, "s", 4, (21, 22, 23))]


def test_all_that_want_share_one_call_and_one_that_does_not_is_left_alone(
    scheduler: Scheduler, drafter: CountingDrafter
) -> None:
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        scheduler.apply(0, opened(name, token, draft_len=0))
    assert scheduler.answer() == []
    scheduler.apply(0, committed("c", 1, 7))
    scheduler.apply(0, committed("b", 1, 8, draft_len=0))
    scheduler.apply(0, committed("a", 1, 9))
    events = scheduler.answer()
    assert proposals(events) == [(0, "c", 2, (8, 9)), (0, "a", 2, (10, 11))]
    assert len(drafter.calls) == 2
    assert all(
        event.timings.batch_sessions == 2 for _, event in events if isinstance(event, Proposal)
    )


def test_only_the_latest_want_is_answered(scheduler: Scheduler, figures: Figures) -> None:
    scheduler.apply(0, opened("s", 1))
    scheduler.apply(0, committed("s", 1, 2))
    scheduler.apply(0, committed("s", 2, 3))
    assert proposals(scheduler.answer()) == [(0, "s", 3, (4, 5))]
    assert figures.superseded == 2
    scheduler.apply(0, committed("s", 3, 4))
    scheduler.apply(0, committed("s", 4, 5, draft_len=0))
    assert not scheduler.has_wants
    assert figures.superseded == 3
    assert (figures.drafts, figures.draft_tokens) == (1, 2)


def test_a_superseded_want_keeps_its_place(scheduler: Scheduler, drafter: CountingDrafter) -> None:
    scheduler.apply(0, opened("slow", 777))
    scheduler.apply(0, opened("b", 1))
    scheduler.answer()
    scheduler.apply(0, committed("slow", 1, 5))
    scheduler.apply(0, committed("b", 1, 5))
    scheduler.answer()
    assert [request.session_id for request in drafter.calls[-1]] == ["0/slow", "0/b"]


def test_what_is_not_ready_stays_wanted(scheduler: Scheduler, drafter: CountingDrafter) -> None:
    scheduler.apply(0, opened("slow", 777))
    scheduler.apply(0, opened("b", 1))
    assert proposals(scheduler.answer()) == [(0, "b", 1, (2, 3))]
    assert scheduler.has_wants
    assert scheduler.answer() == []
    drafter.held["0/slow"] = [40]
    assert proposals(scheduler.answer()) == [(0, "slow", 1, (41, 42))]


class SlowDrafter(CountingDrafter):
    """Each call takes 40 ms of a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        self.now_s += 0.040
        return super().propose(requests)


def test_a_draft_reports_what_it_cost_in_all_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = SlowDrafter()
    monkeypatch.setattr("time.monotonic", lambda: drafter.now_s)
    scheduler = Scheduler(drafter, Figures(), max_sessions=8)

    def costs_ms() -> dict[str, int]:
        events = [event for _, event in scheduler.answer()]
        return {e.session_id: e.draft_us // 1000 for e in events if isinstance(e, Proposal)}

    scheduler.apply(0, opened("slow", 777))
    scheduler.apply(0, opened("b", 1))
    assert costs_ms() == {"b": 40}
    assert costs_ms() == {}
    # The time in which nobody worked on it does not count.
    drafter.now_s += 5
    drafter.held["0/slow"] = [40]
    assert costs_ms() == {"slow": 120}
    # What a want cost that a newer one replaced does not count either.
    drafter.held["0/slow"] = [777]
    scheduler.apply(0, committed("slow", 1, 777))
    assert costs_ms() == {}
    scheduler.apply(0, committed("slow", 2, 5))
    drafter.held["0/slow"] = [40]
    assert costs_ms() == {"slow": 40}


def test_the_corpus_reaches_the_drafter() -> None:
    drafter = SuffixDrafter()
    scheduler = Scheduler(drafter, Figures(), max_sessions=8)
    for sid, corpus in (("first", "m"), ("same", "m"), ("other", "n")):
        tokens = (5, 6, 7) if sid == "first" else (9,)
        scheduler.apply(
            0,
            OpenDraft(
                session_id=sid,
                epoch=1,
                token_ids=tokens,
                sampling=SamplingParams(),
                prompt_len=1,
                draft_len=0,
                corpus=corpus,
            ),
        )
        scheduler.answer()
        if sid == "first":
            scheduler.apply(0, CloseDraft(session_id=sid, epoch=1))
    for sid in ("same", "other"):
        scheduler.apply(0, committed(sid, 1, 6, draft_len=1))
    assert proposals(scheduler.answer()) == [(0, "same", 2, (7,)), (0, "other", 2, ())]


def test_one_id_on_two_streams_is_two_sessions(
    scheduler: Scheduler, drafter: CountingDrafter
) -> None:
    """Case 28."""
    scheduler.apply(0, opened("s", 10))
    scheduler.apply(1, opened("s", 20, epoch=9))
    assert proposals(scheduler.answer()) == [(0, "s", 1, (11, 12)), (1, "s", 1, (21, 22))]
    scheduler.close_stream(1)
    scheduler.apply(0, committed("s", 1, 30))
    assert proposals(scheduler.answer()) == [(0, "s", 2, (31, 32))]
    assert list(drafter.held) == ["0/s"]


def test_the_end_of_a_stream_forgets_its_wants(
    scheduler: Scheduler, drafter: CountingDrafter, figures: Figures
) -> None:
    scheduler.apply(0, opened("a", 1))
    scheduler.apply(0, opened("b", 1))
    scheduler.close_stream(0)
    assert not scheduler.has_wants
    assert drafter.held == {}
    assert figures.sessions == 0


def test_lower_epochs_are_fenced(scheduler: Scheduler) -> None:
    scheduler.apply(0, opened("s", 1, epoch=5))
    for command in (opened("s", 2, epoch=4), committed("s", 1, 9, epoch=4), closed("s", epoch=4)):
        assert failures(scheduler.apply(0, command)) == [(0, "s", "FENCED")]
    (event,) = scheduler.apply(0, committed("s", 1, 9, epoch=4))
    assert event[1].epoch == 4
    assert proposals(scheduler.answer()) == [(0, "s", 1, (2, 3))]


def test_opening_again_replaces_the_session(scheduler: Scheduler, figures: Figures) -> None:
    scheduler.apply(0, opened("s", 1, epoch=5))
    scheduler.apply(0, opened("s", 1, 2, 30, epoch=6))
    assert proposals(scheduler.answer()) == [(0, "s", 3, (31, 32))]
    scheduler.apply(0, opened("s", 1, 2, 40, epoch=6))
    assert proposals(scheduler.answer()) == [(0, "s", 3, (41, 42))]
    assert figures.sessions == 1


def test_a_session_that_is_not_here_is_unknown(scheduler: Scheduler) -> None:
    assert failures(scheduler.apply(0, committed("s", 1, 9))) == [(0, "s", "UNKNOWN_SESSION")]
    scheduler.apply(0, opened("s", 1))
    assert failures(scheduler.apply(1, committed("s", 1, 9))) == [(1, "s", "UNKNOWN_SESSION")]
    # Opened again by a message that never came.
    later = committed("s", 1, 9, epoch=2)
    assert failures(scheduler.apply(0, later)) == [(0, "s", "UNKNOWN_SESSION")]
    assert scheduler.apply(0, closed("s")) == []
    assert scheduler.apply(0, closed("s")) == []
    assert failures(scheduler.apply(0, committed("s", 1, 9))) == [(0, "s", "UNKNOWN_SESSION")]


@pytest.mark.parametrize("base_len", [0, 1, 3])
def test_a_commit_that_does_not_continue_is_fenced(scheduler: Scheduler, base_len: int) -> None:
    scheduler.apply(0, opened("s", 1, 2))
    wrong = committed("s", base_len, 9)
    assert failures(scheduler.apply(0, wrong)) == [(0, "s", "FENCED")]
    assert proposals(scheduler.answer()) == [(0, "s", 2, (3, 4))]


def test_a_full_worker_refuses_new_sessions_only(scheduler: Scheduler) -> None:
    for name in "abc":
        assert scheduler.apply(0, opened(name, 1)) == []
    assert failures(scheduler.apply(0, opened("d", 1))) == [(0, "d", "OVERLOADED")]
    assert scheduler.apply(0, opened("a", 2, epoch=2)) == []
    scheduler.apply(0, closed("b"))
    assert scheduler.apply(0, opened("d", 1)) == []


def test_a_draining_worker_opens_nothing_and_goes_on_with_the_rest(scheduler: Scheduler) -> None:
    scheduler.apply(0, opened("a", 1))
    scheduler.answer()
    scheduler.refuse(True)
    assert not scheduler.is_drained
    assert failures(scheduler.apply(0, opened("b", 1))) == [(0, "b", "OVERLOADED")]
    scheduler.apply(0, committed("a", 1, 5))
    assert proposals(scheduler.answer()) == [(0, "a", 2, (6, 7))]
    scheduler.apply(0, closed("a"))
    assert scheduler.is_drained
    scheduler.refuse(False)
    assert scheduler.apply(0, opened("b", 1)) == []
    assert not scheduler.is_drained


def test_a_poisonous_session_fails_alone(
    scheduler: Scheduler, drafter: CountingDrafter, figures: Figures
) -> None:
    scheduler.apply(0, opened("a", 1))
    scheduler.apply(0, opened("poison", 666))
    scheduler.apply(1, opened("b", 2))
    events = scheduler.answer()
    assert failures(events[1:2]) == [(0, "poison", "INTERNAL")]
    assert proposals(events[:1] + events[2:]) == [(0, "a", 1, (2, 3)), (1, "b", 1, (3, 4))]
    assert sorted(drafter.held) == ["0/a", "1/b"]
    assert figures.failed == 1
    later = committed("poison", 1, 2)
    assert failures(scheduler.apply(0, later)) == [(0, "poison", "UNKNOWN_SESSION")]


def test_a_poisonous_session_with_nobody_else(scheduler: Scheduler) -> None:
    scheduler.apply(0, opened("poison", 666))
    assert failures(scheduler.answer()) == [(0, "poison", "INTERNAL")]
    assert not scheduler.has_wants


@pytest.mark.parametrize(("token", "reason"), [(999, "INVALID_REQUEST"), (998, "INTERNAL")])
def test_tokens_that_the_drafter_refuses(
    scheduler: Scheduler, figures: Figures, token: int, reason: str
) -> None:
    assert failures(scheduler.apply(0, opened("s", token))) == [(0, "s", reason)]
    assert not scheduler.has_wants
    assert figures.sessions == 0


def test_absurd_draft_lengths_are_cut(scheduler: Scheduler) -> None:
    scheduler.apply(0, opened("s", 1, draft_len=2**32 - 1))
    ((_, _, _, token_ids),) = proposals(scheduler.answer())
    assert len(token_ids) == MAX_DRAFT_LEN


def test_the_span_continues_the_trace_and_ends_with_the_totals(
    drafter: CountingDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "tracer", provider.get_tracer)
    scheduler = Scheduler(drafter, Figures(), max_sessions=3)
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    scheduler.apply(0, opened("s", 1, traceparent=f"00-{trace_id}-b7ad6b7169203331-01"))
    scheduler.answer()
    scheduler.apply(0, committed("s", 1, 2, 3))
    scheduler.apply(0, committed("s", 3, 4))
    scheduler.answer()
    assert exporter.get_finished_spans() == ()
    scheduler.apply(0, closed("s"))
    (span,) = exporter.get_finished_spans()
    assert span.name == "draft.session"
    assert span.context is not None
    assert span.context.trace_id == int(trace_id, 16)
    assert span.attributes is not None
    totals = {key: span.attributes[f"outrider.{key}"] for key in ("drafts", "draft_tokens")}
    assert totals == {"drafts": 2, "draft_tokens": 4}
    assert span.attributes["outrider.superseded"] == 1
    assert span.attributes["outrider.base_len"] == 4
