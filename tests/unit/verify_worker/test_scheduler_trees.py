"""Trees through the scheduler: what is committed, which KV stays, and what a step has room for."""

import pytest

from outrider.messages import (
    AcceptanceRule,
    Draft,
    DraftWorkerRef,
    Endings,
    OpenDraft,
    SamplingParams,
    SpeculationOptions,
    TokenOrigin,
)
from outrider.model.blocks import BLOCK_TOKENS
from tests.support.scheduling import Worker
from tests.support.synthetic import VOCABULARY, plain_decoding

TRUSTED = DraftWorkerRef("d1", "127.0.0.1:1", trusted=True)
ACCEPTED, RECOVERED, BONUS = TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED, TokenOrigin.BONUS


def wrong(token: int, by: int = 1) -> int:
    return (token + by) % VOCABULARY


def beside(path: list[int], width: int) -> Draft:
    """The path as the last of `width` siblings on each level, level by level."""
    tokens, parents, parent = [], [], -1
    for token in path:
        tokens += [*(wrong(token, by) for by in range(1, width)), token]
        parents += [parent] * width
        parent = len(tokens) - 1
    return Draft(tuple(tokens), tuple(parents))


def ready(worker: Worker, sid: str = "s") -> None:
    """Step until the session waits for a draft."""
    while worker.scheduler.sessions[sid].want is None:
        assert worker.step()


@pytest.mark.parametrize("accepted", range(5))
@pytest.mark.parametrize("prompt", [1, 5, BLOCK_TOKENS - 2])
def test_case_2_kv_after_every_count_of_accepted_levels(prompt: int, accepted: int) -> None:
    worker = Worker(draft_len=4)
    worker.start(prompt=prompt, new=30)
    ready(worker)
    path = worker.right_draft("s", 4)
    for level in range(accepted, 4):
        path[level] = wrong(path[level], 9)
    worker.propose("s", [], draft=beside(path, 3))
    worker.step()
    session = worker.scheduler.sessions["s"]
    assert worker.tokens["s"] == plain_decoding(range(1, prompt + 1), accepted + 2)
    last = BONUS if accepted == 4 else RECOVERED
    assert worker.origins["s"][1:] == [ACCEPTED] * accepted + [last]
    assert session.table.kv_len == len(session.tokens) - 1
    assert len(session.table.blocks) == -(-session.table.kv_len // BLOCK_TOKENS)
    # Every node was verified; by depth, so much was accepted.
    figures = session.figures
    assert (figures.draft_tokens, figures.accepted_tokens) == (12, accepted)
    assert figures.accepted_per_position == [1] * accepted
    # The synthetic runner checks on every step that the KV is that of the committed tokens.
    worker.finish()
    assert worker.tokens["s"] == plain_decoding(range(1, prompt + 1), 30)


def test_a_draft_worker_is_told_how_large_a_tree_may_be() -> None:
    worker = Worker(max_tree_nodes=17)
    worker.start()
    (opened,) = worker.commands(OpenDraft)
    assert opened.max_nodes == 17


def test_a_tree_under_the_rejection_rule_is_dropped_for_a_plain_step() -> None:
    rejection = SpeculationOptions(rule=AcceptanceRule.REJECTION)
    worker = Worker(draft_len=4)
    worker.start(drafter=TRUSTED, sampling=SamplingParams(1.0), speculation=rejection)
    ready(worker)
    worker.propose("s", [], draft=beside(worker.right_draft("s", 2), 2))
    assert worker.scheduler.counters.malformed_proposals == 1
    assert worker.scheduler.sessions["s"].draft is None
    assert worker.step()
    assert worker.origins["s"] == [TokenOrigin.PLAIN] * 2


@pytest.mark.parametrize("rows", range(2, 13))
def test_a_tree_is_cut_to_the_rows_of_a_step_and_stays_a_tree(rows: int) -> None:
    worker = Worker(draft_len=4, step_tokens=64)
    worker.start("s", new=40)
    ready(worker)
    # As many strangers as leave `rows` rows; each needs one.
    for number in range(64 - rows):
        worker.start(f"t{number}", prompt=1, new=40, drafter=None)
    draft = beside(worker.right_draft("s", 4), 3)
    worker.propose("s", [], draft=draft)
    before = len(worker.tokens["s"])
    worker.step()
    kept = min(len(draft.token_ids), rows - 1)
    levels = sum(1 for node in (2, 5, 8, 11) if node < kept)
    assert len(worker.tokens["s"]) - before == levels + 1
    assert worker.scheduler.sessions["s"].figures.draft_tokens == kept


def test_large_trees_do_not_keep_others_from_their_steps() -> None:
    worker = Worker(draft_len=4, step_tokens=32, blocks=200)
    names = [f"s{number}" for number in range(6)]
    for name in names:
        worker.start(name, new=60)
    for _ in range(8):
        for name in names:
            if worker.scheduler.sessions[name].want is not None:
                worker.propose(name, [], draft=beside(worker.right_draft(name, 4), 12))
        assert worker.step()
        # The oldest would take all 32 rows.
        assert worker.runner.rows_of_steps[-1] <= 32
    lengths = [len(worker.tokens[name]) for name in names]
    assert min(lengths) >= 8


@pytest.mark.parametrize("context", [32, 33, 40])
@pytest.mark.parametrize("room", range(1, 8))
def test_case_16_trees_near_the_end_of_the_context(context: int, room: int) -> None:
    worker = Worker(context_len=context, draft_len=4, blocks=20)
    prompt = [token % 40 for token in range(context - room)]
    worker.start(new=1000, tokens=prompt)
    while worker.scheduler.sessions:
        if worker.step():
            continue
        want = worker.scheduler.sessions["s"].want
        assert want is not None
        # The depth is what counts: positions stay within the context, however many nodes.
        assert len(worker.scheduler.sessions["s"].tokens) + want.draft_len < context
        worker.propose("s", [], draft=beside(worker.right_draft("s", want.draft_len), 10))
    assert worker.tokens["s"] == plain_decoding(prompt, room)
    assert worker.scheduler.pool.free == worker.scheduler.pool.total


def test_a_tree_for_which_there_are_no_blocks_is_dropped() -> None:
    # Just enough for prompt and completion.
    worker = Worker(blocks=2, draft_len=4)
    worker.start(prompt=17, new=15)
    ready(worker)
    worker.propose("s", [], draft=beside(worker.right_draft("s", 4), 8))
    worker.step()
    assert worker.origins["s"] == [TokenOrigin.PLAIN] * 2
    worker.finish()
    assert worker.tokens["s"] == plain_decoding(range(1, 18), 15)


def test_a_stop_id_inside_an_accepted_path_ends_the_session_there() -> None:
    expected = plain_decoding(range(1, 6), 20)
    stop = expected[2]
    worker = Worker(draft_len=4)
    worker.start(new=20, endings=Endings(20, frozenset({stop})))
    ready(worker)
    worker.propose("s", [], draft=beside(worker.right_draft("s", 4), 3))
    worker.step()
    assert worker.tokens["s"] == expected[: expected.index(stop) + 1]
    assert worker.scheduler.counters.speculation.acceptance_rate <= 1.0
    assert worker.scheduler.pool.free == worker.scheduler.pool.total
