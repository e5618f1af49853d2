"""`numerics = invariant`: the bits of a row's logits depend on its own tokens alone.

One text is run in many ways, and every row of it must come out with the bits that it has when
each token is run in a step of its own: in chunks, as plain steps, as drafts with rejected
tails and in trees, in blocks that lie anywhere, beside up to 32 rows of strangers, with one
thread or two, and from the start again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import MixtralConfig

from outrider.errors import UnsupportedModelError
from outrider.model.blocks import BLOCK_TOKENS, BlockTable
from outrider.model.compiled.decoder import CompiledDecoder
from outrider.model.fast import FastNumerics
from outrider.model.invariance import first_dependence
from outrider.model.invariant import InvariantNumerics
from outrider.model.linears.tiled import torch_threads
from outrider.model.loading import LoadedModel, load_model
from outrider.model.numerics import FAST, INVARIANT, choose_numerics
from outrider.model.paged import NO_PARENT, Numerics, PagedModel, Segment
from tests.support.models import CONTEXT, EOS, FAMILIES, VOCABULARY, WINDOW, save_model

# The family whose tiny model can be compiled.
COMPILED = "qwen3"
# Past two blocks and past the sliding window.
LENGTH = 2 * BLOCK_TOKENS + WINDOW + 5
BLOCKS = 160
# NeoX has nothing here that the others lack, and takes its time.
CASES = [(family, "float32") for family in FAMILIES if family != "gpt_neox"]
CASES += [("llama", "bfloat16")]


@dataclass
class Subject:
    """A model, a text, and the logits of each of its rows when it is run token by token."""

    loaded: LoadedModel
    numerics: Numerics
    text: list[int]
    expected: torch.Tensor
    paged: PagedModel = field(init=False)

    def __post_init__(self) -> None:
        self.paged = PagedModel(self.loaded, BLOCKS, self.numerics)


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()


def subject(loaded: LoadedModel, numerics: Numerics) -> Subject:
    text = random_tokens(LENGTH, 11)
    paged = PagedModel(loaded, 8, numerics)
    table = BlockTable()
    paged.pool.grow(table, LENGTH)
    rows = []
    with torch_threads(1):
        for token in text:
            rows.append(paged.forward([Segment([token], table, 1)]))
            table.kv_len += 1
    return Subject(loaded, numerics, text, torch.cat(rows))


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def invariant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    family, dtype = request.param
    path = save_model(tmp_path_factory.mktemp(family), family)
    loaded = load_model(str(path), dtype=dtype)
    numerics = choose_numerics(INVARIANT, loaded)
    if family == COMPILED:
        assert isinstance(numerics, CompiledDecoder)
    else:
        assert isinstance(numerics, InvariantNumerics)
        assert numerics.pass_rows > 1, "the slow way out is not what is tested here"
    return subject(loaded, numerics)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Move:
    """One step: how many tokens of the text, in which form, among how many rows of strangers."""

    kind: str
    rows: int
    before: list[int]
    after: list[int]
    threads: int
    seed: int


strangers = st.lists(st.sampled_from([1, 1, 1, 2, 5, 9, 17]), max_size=4)
moves = st.builds(
    Move,
    kind=st.sampled_from(["rows", "rejected tail", "tree"]),
    rows=st.sampled_from([1, 1, 2, 3, 4, 5, 9, 16, 31, 32]),
    before=strangers,
    after=strangers,
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)


def first_difference(subject: Subject, plan: list[Move], holes: list[int]) -> str:
    """Run the text as planned; the first row whose bits are not the expected ones."""
    paged, text = subject.paged, subject.text
    table, other, hole = BlockTable(), BlockTable(), BlockTable()
    paged.pool.grow(other, 17)
    paged.forward([Segment(random_tokens(17, 3), other, 0)])
    other.kv_len = 17
    paged.pool.grow(other, 17 + 40)
    try:
        for number, move in enumerate([*plan, Move("rows", LENGTH, [], [], 1, 0)]):
            done = table.kv_len
            count = min(move.rows, len(text) - done)
            if not count:
                break
            if number < len(holes):
                # Others take blocks in between, so that the table's own are anywhere.
                paged.pool.grow(hole, len(hole.blocks) * BLOCK_TOKENS + holes[number])
            segment, kept = as_segment(table, text[done : done + count], move)
            paged.pool.grow(table, done + len(segment.token_ids))
            before = [Segment(random_tokens(n, n), other, n) for n in move.before]
            after = [Segment(random_tokens(n, n + 1), other, n // 2) for n in move.after]
            with torch_threads(move.threads):
                logits = paged.forward([*before, segment, *after])
            begin = sum(move.before)
            rows = logits[begin : begin + len(segment.token_ids)][kept]
            expected = subject.expected[done : done + count]
            if not torch.equal(rows, expected):
                row = int((rows != expected).any(-1).nonzero()[0])
                return f"row {done + row} in {move}"
            paged.keep_path(table, kept)
            table.kv_len += count
        return ""
    finally:
        for used in (table, other, hole):
            paged.pool.release(used)


def as_segment(table: BlockTable, tokens: list[int], move: Move) -> tuple[Segment, list[int]]:
    """The tokens in the form that the move asks for, and which of its rows they are."""
    count = len(tokens)
    junk = random_tokens(2 * count + 3, move.seed)
    if move.kind == "rows":
        return Segment(tokens, table, count), list(range(count))
    if move.kind == "rejected tail":
        return Segment(tokens + junk[:3], table, count + 3), list(range(count))
    # A tree: each token of the text has a sibling or a stray child somewhere before it.
    tree, parents, kept, last = [], [], [0], NO_PARENT
    for token, stray in zip(tokens[1:], junk, strict=False):
        if stray % 3:
            parents.append(last if stray % 2 or not tree else stray % len(tree))
            tree.append(stray)
        parents.append(last)
        tree.append(token)
        last = len(tree) - 1
        kept.append(1 + last)
    return Segment([tokens[0], *tree], table, 1 + len(tree), parents), kept


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(plan=st.lists(moves, max_size=12), holes=st.lists(st.sampled_from([0, 1, 40]), max_size=4))
def test_bits_depend_on_the_rows_own_tokens_alone(
    plan: list[Move], holes: list[int], invariant: Subject, restored_threads: None
) -> None:
    assert first_difference(invariant, plan, holes) == ""
    assert invariant.paged.pool.free == BLOCKS


@pytest.mark.parametrize("threads", [1, 2])
def test_batches_of_1_to_32_rows(invariant: Subject, threads: int) -> None:
    paged, text = invariant.paged, invariant.text
    begin = LENGTH - 1
    tables = [BlockTable() for _ in range(32)]
    for table in tables:
        paged.pool.grow(table, LENGTH)
        paged.forward([Segment(text[:begin], table, 0)])
        table.kv_len = begin
    with torch_threads(threads):
        for size in range(1, 33):
            chosen = tables[:size]
            logits = paged.forward([Segment(text[begin:], table, 1) for table in chosen])
            assert torch.equal(logits, invariant.expected[begin:].expand(size, -1)), size
    for table in tables:
        paged.pool.release(table)


def test_the_property_fails_where_it_should(tmp_path: Path, restored_threads: None) -> None:
    """A test of the test: the same checks on numerics that are not invariant."""
    loaded = load_model(str(save_model(tmp_path)))
    head: Any = loaded.module.get_output_embeddings()
    inner = head.forward

    def by_height(x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = inner(x)
        return logits * (1 + 1e-6 * x.shape[-2])

    # Whatever the machine does by itself, this model's sums surely depend on the batch.
    head.forward = by_height
    plan = [Move("rows", 4, [], [], 1, 0)]
    wrong = subject(loaded, FastNumerics())
    assert first_difference(wrong, plan, []).startswith("row 0 in")
    assert "depend on the chunks" in first_dependence(loaded, FastNumerics())
    # Passes of one height make it so again.
    right = subject(loaded, choose_numerics(INVARIANT, loaded))
    assert first_difference(right, plan, []) == ""


def test_fast_numerics_do_depend_on_the_batch(tmp_path: Path, restored_threads: None) -> None:
    """Else all of this would be for nothing."""
    loaded = load_model(str(save_model(tmp_path)))
    fast = subject(loaded, choose_numerics(FAST, loaded))
    plans = [[Move("rows", rows, [], [], 1, 0)] for rows in (2, 3, 5, 9, 16, 32)]
    assert any(first_difference(fast, plan, []) for plan in plans)


class Restless(torch.nn.Module):
    """Says something else at each call."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) + 1e-3 * self.calls


def test_a_model_that_cannot_be_invariant_is_refused_with_the_reason(tmp_path: Path) -> None:
    loaded = load_model(str(save_model(tmp_path)))
    model: Any = loaded.module
    model.model.norm = Restless(model.model.norm)
    with pytest.raises(UnsupportedModelError, match=r"logits depend on .* even one row at a time"):
        choose_numerics(INVARIANT, loaded)


def test_experts_are_run_one_row_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_threads: None
) -> None:
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=EOS,
    )
    monkeypatch.setitem(FAMILIES, "mixtral", lambda: config)
    loaded = load_model(str(save_model(tmp_path, "mixtral")))
    numerics = choose_numerics(INVARIANT, loaded)
    assert isinstance(numerics, InvariantNumerics)
    assert numerics.pass_rows == 1
    plan = [Move("rows", 9, [5], [2], 1, 0), Move("tree", 5, [1], [], 2, 0)]
    assert first_difference(subject(loaded, numerics), plan, [40]) == ""
