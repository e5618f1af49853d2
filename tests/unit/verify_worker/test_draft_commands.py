"""What draft workers are told: everything in the end, and nothing before it is of use."""

from typing import Any

import pytest

from outrider.messages import CloseDraft, CommitDraft, DraftCommand, OpenDraft
from tests.support.scheduling import DRAFTER, Worker
from tests.support.synthetic import states_of
from verify_worker.draft_commands import MOST_UNTOLD
from verify_worker.policy import UNWILLING_TOKENS

LAYERS = 7


def said(worker: Worker, sid: str = "s") -> list[DraftCommand]:
    """All commands about a session."""
    return [out.command for out in worker.to_drafter if out.command.session_id == sid]


def text_of(commands: list[DraftCommand]) -> list[int]:
    """The session's tokens as its draft worker knows them."""
    text: list[int] = []
    for command in commands:
        if isinstance(command, OpenDraft):
            text = list(command.token_ids)
        elif isinstance(command, CommitDraft):
            assert command.base_len == len(text)
            text += command.token_ids
    return text


def where_no_draft_pays(**limits: Any) -> Worker:
    """A worker whose draft worker was never right, so that hardly anything is asked for."""
    worker = Worker(blocks=256, context_len=4096, **limits)
    worker.start("before", new=600)
    for _ in range(120):
        session = worker.scheduler.sessions["before"]
        if session.want is not None:
            worker.now += 0.02
            right = worker.right_draft("before", 1)[0]
            worker.propose(
                "before", [right % 40 + 1] * 4, draft_us=20_000, feature_layers=(LAYERS,)
            )
        if not worker.step():
            worker.now = max(worker.now, worker.scheduler.wake_at_s(worker.now) or worker.now)
    assert not worker.scheduler.sessions["before"].shares
    return worker


def test_nothing_is_said_where_nothing_is_asked_and_all_of_it_with_the_next_question() -> None:
    worker = where_no_draft_pays(corpus="m")
    session = worker.scheduler.sessions["before"]
    asked = [c for c in said(worker, "before") if isinstance(c, CommitDraft) and c.draft_len]
    commits = [c for c in said(worker, "before") if isinstance(c, CommitDraft)]
    # Far fewer messages than rounds; every one asks, or tells of a full batch.
    assert len(commits) < 40
    assert all(c.draft_len or len(c.token_ids) >= MOST_UNTOLD for c in commits)
    assert len(asked) >= 2
    told = text_of(said(worker, "before"))
    assert told == session.tokens[: len(told)]
    assert len(session.tokens) - len(told) < MOST_UNTOLD


def test_a_session_that_would_not_draft_is_opened_when_it_asks_first() -> None:
    worker = where_no_draft_pays(layers=LAYERS)
    worker.start("new", new=60)
    assert said(worker, "new") == []
    # It looks, as it may have other luck than those before it.
    while not said(worker, "new"):
        worker.scheduler.drafts.workers[DRAFTER.worker_id].look_from_s = 0.0
        assert worker.step()
        assert "new" not in worker.ends
    session = worker.scheduler.sessions["new"]
    opened, asked = said(worker, "new")
    assert isinstance(opened, OpenDraft)
    assert isinstance(asked, CommitDraft)
    assert asked.draft_len > 0
    assert text_of([opened, asked]) == session.tokens
    # What the last tokens were made of goes with them.
    [(layer, hidden)] = asked.features or ()
    assert (layer, hidden) == (LAYERS, states_of(opened.token_ids, asked.token_ids))


def test_one_that_never_asked_is_never_heard_of_without_a_corpus() -> None:
    worker = where_no_draft_pays()
    worker.scheduler.drafts.workers[DRAFTER.worker_id].look_from_s = float("inf")
    worker.start("quiet", new=2)
    while "quiet" not in worker.ends:
        worker.step()
    assert said(worker, "quiet") == []


@pytest.mark.parametrize("opens_late", [False, True])
def test_whoever_may_learn_from_a_text_gets_all_of_it(opens_late: bool) -> None:
    worker = where_no_draft_pays(corpus="m") if opens_late else Worker(corpus="m")
    if opens_late:
        worker.scheduler.drafts.workers[DRAFTER.worker_id].look_from_s = float("inf")
    worker.start("s", prompt=5, new=9)
    while "s" not in worker.ends:
        if not worker.step():
            worker.now = max(worker.now, worker.scheduler.wake_at_s(worker.now) or worker.now)
    commands = said(worker)
    assert isinstance(commands[-1], CloseDraft)
    assert text_of(commands)[5:] == worker.tokens["s"]
    assert commands[0].prompt_len == 5  # type: ignore[union-attr]  # it is an OpenDraft


def test_looking_takes_a_small_share_of_the_drafters_time() -> None:
    worker = where_no_draft_pays()
    for number in range(8):
        worker.start(f"{number}", new=200)
    began_s = worker.scheduler.drafts.workers[DRAFTER.worker_id].look_from_s = worker.now
    looks = 0
    for _ in range(150):
        for sid, session in worker.scheduler.sessions.items():
            if session.want is not None:
                looks += session.looks
                # 20 ms of the drafter's time each.
                worker.propose(sid, [49] * 4, draft_us=20_000)
        if not worker.step():
            worker.now = max(worker.now, worker.scheduler.wake_at_s(worker.now) or worker.now)
    assert 1 <= looks <= 1 + (worker.now - began_s) * 0.01 / 0.02


def test_one_that_is_alone_looks_whatever_that_takes() -> None:
    worker = where_no_draft_pays()
    worker.scheduler.drafts.workers[DRAFTER.worker_id].look_from_s = float("inf")
    session = worker.scheduler.sessions["before"]
    for _ in range(300):
        if session.want is not None and session.looks:
            return
        if not worker.step():
            worker.now = max(worker.now, worker.scheduler.wake_at_s(worker.now) or worker.now)
    raise AssertionError("it never looks again")


def test_plain_rounds_are_not_reckoned_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = where_no_draft_pays()
    drafter = worker.scheduler.drafts.workers[DRAFTER.worker_id]
    drafter.look_from_s = float("inf")
    reckoned: list[int] = []
    choose = type(drafter).choose

    def counted(self: Any, *args: Any) -> Any:
        reckoned.append(1)
        return choose(self, *args)

    monkeypatch.setattr(type(drafter), "choose", counted)
    before = len(worker.scheduler.sessions["before"].tokens)
    for _ in range(40):
        worker.step()
    committed = len(worker.scheduler.sessions["before"].tokens) - before
    assert committed == 40
    assert len(reckoned) == committed // UNWILLING_TOKENS
