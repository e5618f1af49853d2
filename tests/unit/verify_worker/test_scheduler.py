from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import FencedError, InvalidRequestError, OverloadedError
from outrider.messages import (
    AssignDrafter,
    CloseDraft,
    CommitDraft,
    Draft,
    DraftFailed,
    Endings,
    FinishReason,
    OpenDraft,
    SessionEnded,
    SessionFailed,
    SpeculationOptions,
    TokenOrigin,
)
from tests.support.scheduling import DRAFTER, OTHER, Worker
from tests.support.synthetic import VOCABULARY, next_token, plain_decoding


def test_a_plain_session() -> None:
    worker = Worker()
    worker.start(drafter=None)
    worker.finish()
    assert worker.tokens["s"] == plain_decoding(range(1, 6), 10)
    assert worker.ends["s"].reason is FinishReason.LENGTH  # type: ignore[union-attr]
    assert set(worker.origins["s"]) == {TokenOrigin.PLAIN}
    assert worker.scheduler.pool.free == worker.scheduler.pool.total
    assert worker.to_drafter == []


def test_a_round_with_a_draft() -> None:
    worker = Worker(draft_len=3)
    worker.start()
    assert isinstance(worker.to_drafter[0].command, OpenDraft)
    worker.step()
    commit = worker.commands(CommitDraft)[-1]
    assert (commit.base_len, commit.draft_len) == (5, 3)
    assert list(commit.token_ids) == worker.tokens["s"]
    # It waits for the proposal, for a bounded time.
    assert not worker.step()
    worker.propose("s", worker.right_draft("s", 3))
    worker.step()
    assert worker.tokens["s"] == plain_decoding(range(1, 6), 5)
    assert worker.origins["s"][1:] == [TokenOrigin.ACCEPTED] * 3 + [TokenOrigin.BONUS]
    worker.finish()
    assert worker.tokens["s"] == plain_decoding(range(1, 6), 10)
    assert isinstance(worker.to_drafter[-1].command, CloseDraft)


@pytest.mark.parametrize("accepted", range(5))
def test_case_2_kv_after_every_count_of_accepted_tokens(accepted: int) -> None:
    worker = Worker(draft_len=4)
    worker.start(new=30)
    worker.step()
    draft = worker.right_draft("s", 4)
    if accepted < 4:
        draft[accepted] = (draft[accepted] + 1) % VOCABULARY
    worker.propose("s", draft)
    worker.step()
    session = worker.scheduler.sessions["s"]
    assert len(session.tokens) == 6 + accepted + 1
    assert session.table.kv_len == len(session.tokens) - 1
    figures = session.figures
    assert (figures.draft_tokens, figures.accepted_tokens) == (4, accepted)
    assert figures.accepted_per_position == [1] * accepted
    worker.finish()
    assert worker.tokens["s"] == plain_decoding(range(1, 6), 30)


def test_a_draft_that_does_not_come_is_not_waited_for_long() -> None:
    worker = Worker(draft_len=4)
    worker.start()
    worker.step()
    wake = worker.scheduler.wake_at_s(worker.now)
    assert wake is not None
    assert not worker.step()
    worker.now = wake
    assert worker.step()
    assert worker.scheduler.counters.missed_proposals == 1


def test_late_drafts_are_asked_for_less_and_less() -> None:
    worker = Worker(draft_len=4)
    worker.start(new=200)
    worker.finish()
    asked = [c for c in worker.commands(CommitDraft) if c.draft_len]
    assert worker.tokens["s"] == plain_decoding(range(1, 6), 200)
    # The first wait, before a step was measured, is long enough for a pause: 16, 32, 64, 128.
    assert len(asked) == worker.scheduler.counters.missed_proposals == 4


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 32, 33])
def test_case_6_prompts_at_block_boundaries(prompt: int) -> None:
    worker = Worker(draft_len=3)
    worker.start(prompt=prompt, new=20)
    while worker.scheduler.sessions:
        if not worker.step():
            worker.propose("s", worker.right_draft("s", 2))
    assert worker.tokens["s"] == plain_decoding(range(1, prompt + 1), 20)


@pytest.mark.parametrize("new", range(1, 10))
def test_case_15_exactly_max_tokens(new: int) -> None:
    worker = Worker(draft_len=4)
    worker.start(new=new)
    while worker.scheduler.sessions:
        if not worker.step():
            want = worker.scheduler.sessions["s"].want
            assert want is not None
            worker.propose("s", worker.right_draft("s", want.draft_len))
    assert worker.tokens["s"] == plain_decoding(range(1, 6), new)
    assert worker.scheduler.counters.speculation.acceptance_rate in (0.0, 1.0)


def test_case_16_the_last_place_of_the_context_is_used() -> None:
    worker = Worker(context_len=64, draft_len=5, draft_wait_s=1.0)
    worker.start(prompt=60, new=1000, tokens=[t % 40 for t in range(60)])
    asked = []
    while worker.scheduler.sessions:
        if not worker.step():
            want = worker.scheduler.sessions["s"].want
            assert want is not None
            asked.append(want.draft_len)
            worker.propose("s", [0] * want.draft_len)
    assert len(worker.tokens["s"]) == 4
    assert worker.ends["s"].reason is FinishReason.LENGTH  # type: ignore[union-attr]
    assert asked == [2, 1]


def test_case_13_a_stop_id_inside_an_accepted_draft() -> None:
    expected = plain_decoding(range(1, 6), 20)
    worker = Worker(draft_len=6)
    worker.start(new=20, endings=Endings(20, frozenset({expected[2]})))
    worker.step()
    worker.propose("s", worker.right_draft("s", 6))
    worker.step()
    assert worker.tokens["s"] == expected[: expected.index(expected[2]) + 1]
    assert worker.ends["s"].reason is FinishReason.STOP  # type: ignore[union-attr]
    assert worker.scheduler.counters.speculation.acceptance_rate == 1.0
    assert worker.scheduler.pool.free == worker.scheduler.pool.total


def wide_tree(nodes: int, depth: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A chain of `depth` tokens and as many first tokens beside it as there is room for."""
    beside = nodes - depth
    return tuple(range(nodes)), (*range(-1, depth - 1), *([-1] * beside))


def rubbish() -> list[tuple[str, Callable[[Worker], None]]]:
    return [
        ("id is the vocabulary size", lambda w: w.propose("s", [VOCABULARY])),
        ("id is -1 as the wire shows it", lambda w: w.propose("s", [2**32 - 1])),
        ("more than was asked for", lambda w: w.propose("s", [1] * 5)),
        (
            "a parent that points forward",
            lambda w: w.propose("s", [], draft=Draft((1, 2), (1, -1))),
        ),
        ("a tree too large", lambda w: w.propose("s", [], draft=Draft(*wide_tree(9)))),
        ("a tree too deep", lambda w: w.propose("s", [], draft=Draft(*wide_tree(6, depth=5)))),
        ("equal siblings", lambda w: w.propose("s", [], draft=Draft((1, 2, 2), (-1, 0, 0)))),
    ]


@pytest.mark.parametrize(("name", "send"), rubbish())
def test_case_24_malformed_drafts_are_dropped_and_quarantined(
    name: str, send: Callable[[Worker], None]
) -> None:
    worker = Worker(draft_len=4, max_tree_nodes=8)
    worker.start()
    worker.start("t", prompt=7)
    worker.step()
    for count in range(1, 4):
        assert not worker.lost
        send(worker)
        assert worker.scheduler.counters.malformed_proposals == count
        # Nothing better will come: a plain step at once.
        assert worker.step()
    # The third one is enough: both sessions leave the worker.
    assert {event.session_id for event in worker.lost} == {"s", "t"}
    assert "malformed" in worker.lost[0].error.message
    worker.finish()
    assert worker.tokens["s"] == plain_decoding(range(1, 6), 10)
    assert worker.tokens["t"] == plain_decoding(range(1, 8), 10)


def stale() -> list[tuple[str, dict[str, Any]]]:
    return [
        ("an older length", {"base_len": 5}),
        ("a length yet to come", {"base_len": 7}),
        ("another epoch", {"epoch": 0}),
        ("another worker", {"worker_id": "d2"}),
        ("an unknown session", {"session_id": "nobody"}),
    ]


@pytest.mark.parametrize(("name", "fields"), stale())
def test_stale_drafts_are_dropped_and_counted(name: str, fields: dict[str, Any]) -> None:
    worker = Worker(draft_len=4)
    worker.start()
    worker.step()
    worker.propose("s", [1, 2], **fields)
    assert worker.scheduler.counters.stale_proposals == 1
    assert worker.scheduler.sessions["s"].draft is None
    worker.propose("s", worker.right_draft("s", 2))
    worker.propose("s", [3, 3])
    assert worker.scheduler.counters.stale_proposals == 2
    worker.finish()
    assert worker.tokens["s"] == plain_decoding(range(1, 6), 10)


def test_a_lost_draft_worker_means_plain_steps_and_another_one_is_taken() -> None:
    worker = Worker(draft_len=4)
    worker.start(new=20)
    worker.step()
    worker.take(worker.scheduler.drafts.lose("d1"))
    assert [event.worker_id for event in worker.lost] == ["d1"]
    assert worker.step()
    assign = AssignDrafter(session_id="s", epoch=1, drafter=OTHER)
    worker.take(worker.scheduler.drafts.assign(assign))
    opened = worker.to_drafter[-1]
    assert opened.worker == OTHER
    assert opened.command.token_ids == tuple(worker.scheduler.sessions["s"].tokens)  # type: ignore[union-attr]
    worker.step()
    worker.propose("s", worker.right_draft("s", 4), worker_id="d2")
    worker.step()
    assert TokenOrigin.BONUS in worker.origins["s"]
    worker.finish()
    assert worker.tokens["s"] == plain_decoding(range(1, 6), 20)


def test_a_draft_worker_that_forgot_the_session_is_told_again() -> None:
    worker = Worker()
    worker.start(new=40)
    worker.step()
    failure = DraftFailed(session_id="s", epoch=1, error=FencedError("unknown"))
    for _ in range(3):
        worker.take(worker.scheduler.drafts.failed("d1", failure))
        assert isinstance(worker.to_drafter[-1].command, OpenDraft)
    worker.take(worker.scheduler.drafts.failed("d1", failure))
    assert len(worker.lost) == 1
    worker.start("t")
    full = DraftFailed(session_id="t", epoch=1, error=OverloadedError("full"))
    worker.take(worker.scheduler.drafts.failed("d1", full))
    assert len(worker.lost) == 2


def test_speculation_off_never_speaks_to_a_draft_worker() -> None:
    worker = Worker()
    worker.start(speculation=SpeculationOptions(enabled=False))
    assign = AssignDrafter(session_id="s", epoch=1, drafter=OTHER)
    worker.take(worker.scheduler.drafts.assign(assign))
    worker.finish()
    assert worker.to_drafter == []


def test_a_session_goes_on_from_its_committed_tokens() -> None:
    expected = plain_decoding(range(1, 6), 12)
    worker = Worker()
    worker.start(tokens=[*range(1, 6), *expected[:7]], prompt_len=5, new=12)
    worker.finish()
    assert worker.tokens["s"] == expected[7:]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": 300, "tokens": [1] * 300}, "context holds 256"),
        ({"tokens": [1, VOCABULARY]}, "vocabulary"),
        ({"new": 250}, "holds 64"),
    ],
)
def test_what_cannot_be_served_is_refused_with_figures(fields: dict[str, Any], reason: str) -> None:
    worker = Worker(blocks=4)
    worker.start(**fields)
    end = worker.ends["s"]
    assert isinstance(end, SessionFailed)
    assert isinstance(end.error, InvalidRequestError)
    assert reason in end.error.message
    assert not worker.scheduler.sessions


def test_one_poisoned_session_fails_alone() -> None:
    worker = Worker()
    worker.start("good")
    worker.start("bad", prompt=6)
    worker.runner.poisoned.add("bad")
    worker.finish()
    assert isinstance(worker.ends["bad"], SessionFailed)
    assert worker.tokens["good"] == plain_decoding(range(1, 6), 10)
    assert worker.scheduler.pool.free == worker.scheduler.pool.total


def test_a_long_prompt_shares_steps_with_running_sessions() -> None:
    worker = Worker(step_tokens=32)
    worker.start("short", new=20, drafter=None)
    worker.step()
    worker.start("long", tokens=[t % 40 for t in range(100)], new=3, drafter=None)
    before = len(worker.tokens["short"])
    for steps in range(1, 4):
        worker.step()
        assert len(worker.tokens["short"]) == before + steps
    assert max(worker.runner.rows_of_steps) <= 32
    worker.finish()
    assert worker.tokens["long"] == plain_decoding([t % 40 for t in range(100)], 3)


def test_case_26_a_pool_that_is_far_too_small() -> None:
    worker = Worker(blocks=6, step_tokens=32)
    prompts = {f"s{i}": [(i * 7 + t) % 40 for t in range(20 + 9 * i)] for i in range(6)}
    for sid, prompt in prompts.items():
        worker.start(sid, tokens=prompt, new=12)
    worker.finish()
    assert worker.scheduler.counters.preemptions > 0
    for sid, prompt in prompts.items():
        assert worker.tokens[sid] == plain_decoding(prompt, 12)
    assert worker.scheduler.pool.free == 6


def test_more_sessions_than_take_part_wait_their_turn() -> None:
    worker = Worker(max_sessions=2)
    for number in range(5):
        worker.start(f"s{number}", prompt=3 + number, new=4, drafter=None)
    assert worker.scheduler.running == 2
    worker.finish()
    for number in range(5):
        assert worker.tokens[f"s{number}"] == plain_decoding(range(1, 4 + number), 4)


def test_the_end_of_a_stream_closes_its_sessions() -> None:
    worker = Worker()
    worker.start("a")
    worker.start("b")
    worker.step()
    worker.take(worker.scheduler.close_owner(2))
    assert len(worker.scheduler.sessions) == 2
    worker.take(worker.scheduler.close_owner(1))
    assert not worker.scheduler.sessions
    assert len(worker.commands(CloseDraft)) == 2
    assert worker.scheduler.pool.free == worker.scheduler.pool.total


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whatever_happens_every_session_says_what_plain_decoding_says(data: st.DataObject) -> None:
    worker = Worker(blocks=data.draw(st.integers(6, 20)), step_tokens=32, max_sessions=4)
    prompts: dict[str, list[int]] = {}
    closed: set[str] = set()
    for number in range(data.draw(st.integers(5, 40))):
        live = sorted(worker.scheduler.sessions)
        choice = data.draw(st.sampled_from(["start", "step", "step", "draft", "close", "lose"]))
        sid = data.draw(st.sampled_from(live)) if live else None
        if choice == "start":
            prompt = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=50))
            prompts[f"s{number}"] = prompt
            worker.start(f"s{number}", tokens=prompt, new=data.draw(st.integers(1, 30)))
        elif choice == "step" or sid is None:
            if not worker.step():
                worker.now += data.draw(st.sampled_from([0.0, 10.0]))
        elif choice == "draft":
            right = data.draw(st.integers(0, 4))
            wrong = data.draw(st.lists(st.integers(0, VOCABULARY + 1), max_size=3))
            worker.propose(sid, [*worker.right_draft(sid, right), *wrong])
        elif choice == "close":
            closed.add(sid)
            worker.take(worker.scheduler.close(sid, 1))
        else:
            worker.take(worker.scheduler.drafts.lose("d1"))
            assign = AssignDrafter(session_id=sid, epoch=1, drafter=DRAFTER)
            worker.take(worker.scheduler.drafts.assign(assign))
    worker.finish()
    for sid, prompt in prompts.items():
        said = worker.tokens.get(sid, [])
        assert said == plain_decoding(prompt, len(said))
        assert sid in closed or isinstance(worker.ends[sid], SessionEnded)
    assert worker.scheduler.pool.free == worker.scheduler.pool.total


def test_the_synthetic_target_depends_on_order() -> None:
    assert next_token([1, 2]) != next_token([2, 1])
