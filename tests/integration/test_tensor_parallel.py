"""A verify worker's scheduler and runner on two ranks: the text is that of one."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.errors import RankLostError
from outrider.messages import Draft, LogprobOptions, SamplingParams
from outrider.model.loading import load_model
from outrider.model.parallel.group import Limits
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
LOGPROBS = LogprobOptions(top=2, processed=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"))


def start(worker: Stepper) -> None:
    """Sessions that share a prefix, each with a sampling of its own; one tells logprobs."""
    for number, sampling in enumerate(SAMPLINGS):
        logprobs = LOGPROBS if number in (1, 4) else None
        worker.start(f"s{number}", [*PREFIX, number], NEW, sampling, logprobs=logprobs)


def decode(worker: Stepper, known: dict[str, Said] | None = None) -> dict[str, Said]:
    """Every session to its end, with trees that hold what is `known` to come, or without."""
    start(worker)
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


def test_sessions_with_trees_say_the_same_on_two_ranks(path: Path) -> None:
    expected = decode(Stepper(load_model(str(path)), draft_len=DRAFT_LEN))
    assert len(expected) == len(SAMPLINGS)
    # Too few blocks for all at once: some are preempted, and come back.
    with running(path, 2, blocks=9) as ranks:
        worker = Stepper(ranks.model, draft_len=DRAFT_LEN)
        free = ranks.model.pool.free
        found = decode(worker, expected)
        assert ranks.model.pool.free == free
    assert {sid: said.tokens for sid, said in found.items()} == {
        sid: said.tokens for sid, said in expected.items()
    }
    counters = worker.scheduler.counters
    assert counters.preemptions
    assert counters.speculation.accepted_tokens > NEW
    for sid in ("s1", "s4"):
        own, others = found[sid].logprobs, expected[sid].logprobs
        assert [e.logprob for e in own] == pytest.approx([e.logprob for e in others], abs=1e-4)


def test_a_lost_rank_is_no_fault_of_a_session(path: Path) -> None:
    with running(path, 2, limits=Limits(start_s=120.0, step_s=3.0)) as ranks:
        worker = Stepper(ranks.model, draft_len=DRAFT_LEN)
        start(worker)
        assert worker.step()
        ranks.kill(1)
        with pytest.raises(RankLostError):
            worker.step()
        assert not any(said.ended for said in worker.said.values())
