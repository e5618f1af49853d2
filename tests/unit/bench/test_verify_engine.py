"""The engine that benchmarks drive says what transformers says, and its steps can be repeated."""

import pytest

from bench.engine import PHASES, VerifyEngine
from bench.sides import Transformers
from outrider.messages import Draft
from tests.support.models import save_model

PROMPTS = [[1, 2, 3, 4, 5], [200, 100, 50, 25, 12]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def engine(path: str) -> VerifyEngine:
    return VerifyEngine(path, threads=1)


def test_both_sides_say_the_same_and_exactly_as_much_as_asked(
    path: str, engine: VerifyEngine
) -> None:
    ours = engine.complete(PROMPTS, 12)
    theirs = Transformers(path).complete(PROMPTS, 12)
    assert [len(said) for said in ours.token_ids] == [12, 12]
    assert ours.token_ids == theirs.token_ids
    assert ours.seconds > 0
    assert not engine.scheduler.sessions


def test_a_step_is_its_phases(engine: VerifyEngine) -> None:
    sessions = engine.decoding(PROMPTS, 9)
    step = engine.step()
    assert tuple(step.phases) == PHASES
    assert all(seconds >= 0 for seconds in step.phases.values())
    assert step.seconds == pytest.approx(sum(step.phases.values()))
    assert 0 < step.phases["forward"] < step.seconds
    assert step.outside == pytest.approx(1 - step.phases["forward"] / step.seconds)
    assert step.tokens.keys() == set(sessions)
    assert not step.ended


def test_a_verification_leaves_the_session_as_it_was(engine: VerifyEngine) -> None:
    expected = engine.complete([PROMPTS[0]], 8).token_ids[0]
    (session,) = engine.decoding([PROMPTS[0]], 8)
    state = engine.scheduler.sessions[session]
    before = (list(state.tokens), state.table.kv_len, engine.scheduler.pool.free)
    chain = engine.verification(session, Draft(tuple(range(20))))
    tree = engine.verification(session, Draft((1, 2, 3, 4), (-1, -1, 0, 0)))
    for seconds in (chain, tree, chain):
        assert seconds() > 0
    assert (list(state.tokens), state.table.kv_len, engine.scheduler.pool.free) == before
    said = state.tokens[len(PROMPTS[0]) :]
    while session in engine.scheduler.sessions:
        said += engine.step().tokens[session]
    assert said == expected


def test_a_forward_of_transformers_can_be_repeated(path: str) -> None:
    side = Transformers(path)
    prompt = PROMPTS[0]
    forward = side.verification(prompt, 3)
    # The rows are the prompt's first tokens, once more.
    expected = [side.complete([prompt + prompt[: n + 1]], 1).token_ids[0][0] for n in range(3)]
    for _ in range(3):
        assert forward() > 0
        assert forward.best == expected
