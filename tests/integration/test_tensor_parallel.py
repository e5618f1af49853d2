"""A verify worker's scheduler and runner on two ranks: the text is that of one."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from outrider.errors import RankLostError
from outrider.messages import Draft, LogprobOptions, SamplingParams
from outrider.model.loading import load_model
from outrider.model.parallel.group import Limits
from outrider.model.parallel.leader import ParallelModel
from tests.support.models import TOKENS, save_model
from tests.support.ranks import running
from tests.support.stepping import Said, Stepper

NEW = 20
DRAFT_LEN = 4
PREFIX = [(11 * i) % 256 for i in range(20)]
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, seed=2**64 - 1),
    SamplingParams(temperature=0.9, seed=3, top_p=0.8),
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
    SamplingParams(temperature=1.3, seed=5),
]
LONG = [(13 * i + 2) % 256 for i in range(60)]
LOGPROBS = LogprobOptions(top=2, processed=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"))


def begin(worker: Stepper) -> None:
    """Sessions that share a prefix, each with a sampling of its own; one tells logprobs."""
    for number, sampling in enumerate(SAMPLINGS):
        logprobs = LOGPROBS if number in (1, 4) else None
        worker.start(f"s{number}", [*PREFIX, number], NEW, sampling, logprobs=logprobs)


def decode(worker: Stepper, known: dict[str, Said] | None = None) -> dict[str, Said]:
    """Every session to its end, with trees that hold what is `known` to come, or without."""
    begin(worker)
    while True:
        for session in worker.wanting:
            sid = session.session_id
            said = len(session.tokens) - session.prompt_len
            assert session.want is not None
            wide = known is not None and session.want.draft_len == DRAFT_LEN
            draft = tree(known[sid].tokens[said:]) if known and wide else Draft(())
            worker.propose(session, draft)
        if not worker.step():
            return worker.said


def tree(right: Sequence[int]) -> Draft:
    """Up to two right tokens that lie apart, then a wrong one."""
    right = [*right, 0, 0, 0][:3]
    wrong = [(token + 1) % TOKENS for token in right]
    return Draft((wrong[0], right[0], wrong[1], right[1], wrong[2]), (-1, -1, 1, 1, 3))


@pytest.fixture(scope="module")
def split(path: Path) -> Iterator[ParallelModel]:
    """Two ranks, with too few blocks for all sessions at once."""
    with running(path, 2, blocks=9) as ranks:
        yield ranks.model


def test_sessions_with_trees_say_the_same_on_two_ranks(path: Path, split: ParallelModel) -> None:
    expected = decode(Stepper(load_model(str(path)), draft_len=DRAFT_LEN))
    assert len(expected) == len(SAMPLINGS)
    worker = Stepper(split, draft_len=DRAFT_LEN)
    free = split.pool.free
    found = decode(worker, expected)
    assert split.pool.free == free
    assert {sid: said.tokens for sid, said in found.items()} == {
        sid: said.tokens for sid, said in expected.items()
    }
    counters = worker.scheduler.counters
    # Some gave up their blocks, and came back.
    assert counters.preemptions
    assert counters.speculation.accepted_tokens > NEW
    for sid in ("s1", "s4"):
        own, others = found[sid].logprobs, expected[sid].logprobs
        assert [e.logprob for e in own] == pytest.approx([e.logprob for e in others], abs=1e-4)


def say_in_turn(worker: Stepper) -> dict[str, list[int]]:
    """A long prompt beside a session that decodes; then it again, and one that begins otherwise."""

    def start(sid: str, prompt: list[int], seed: int) -> None:
        worker.start(sid, prompt, 8, SamplingParams(1.0, seed=seed), drafter=None)

    start("beside", [5, 6, 7], 1)
    assert worker.step()
    start("first", LONG, 2)
    while worker.step():
        pass
    start("again", LONG, 3)
    start("other", [1, *LONG[1:20]], 4)
    while worker.step():
        pass
    return {sid: said.tokens for sid, said in worker.said.items()}


def test_prefill_in_chunks_and_a_prefix_that_is_there_on_two_ranks(
    path: Path, split: ParallelModel
) -> None:
    expected = say_in_turn(Stepper(load_model(str(path)), prefix_cache=False))
    worker = Stepper(split, step_tokens=16)
    assert say_in_turn(worker) == expected
    assert len({*expected["first"], *expected["again"]}) > 8
    prefills = [
        (
            work.session.session_id,
            work.adoption.kv_len if work.adoption else 0,
            work.committed_rows,
            len(plan.work),
        )
        for plan in worker.plans
        for work in plan.work
        if work.committed_rows > 1
    ]
    # In each of its steps the session beside decodes. Of its blocks three are full.
    assert [rest for sid, *rest in prefills if sid == "first"] == [
        [0, 16, 2],
        [0, 16, 2],
        [0, 16, 2],
        [0, 12, 2],
    ]
    assert [(adopted, rows) for sid, adopted, rows, _ in prefills if sid == "again"] == [(48, 12)]
    assert not any(adopted for sid, adopted, *_ in prefills if sid == "other")
    assert worker.scheduler.counters.prefix_hits == 48


def test_a_lost_rank_is_no_fault_of_a_session(path: Path) -> None:
    with running(path, 2, limits=Limits(start_s=120.0, step_s=3.0)) as ranks:
        worker = Stepper(ranks.model, draft_len=DRAFT_LEN)
        begin(worker)
        assert worker.step()
        ranks.kill(1)
        with pytest.raises(RankLostError):
            worker.step()
        assert not any(said.ended for said in worker.said.values())
