"""A model on several ranks against the same model on one."""

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.errors import RankLostError, UnsupportedModelError
from outrider.messages import SamplingParams
from outrider.model.blocks import BlockPool, BlockTable
from outrider.model.loading import load_model
from outrider.model.paged import NO_PARENT, Segment
from outrider.model.parallel.group import Limits
from outrider.sampling.rows import Row
from outrider.sampling.scores import Choosing, Scores
from tests.support.hundred import LIMITS, say_hundred
from tests.support.models import TOKENS, save_model, save_tokenizer
from tests.support.ranks import alone, running
from tests.support.stepping import Stepper

PROMPT = [(7 * i) % 251 for i in range(40)]


class Model(Protocol):
    """A `PagedModel` or what looks like one."""

    @property
    def pool(self) -> BlockPool: ...
    def forward(self, segments: Any) -> torch.Tensor: ...
    def score(self, segments: Any, choosing: Choosing) -> Scores: ...
    def keep_paths(self, kept: Any) -> None: ...


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen3", "gpt_neox", "gemma2"):
        save_model(where / family, family)
    return where


def table_for(model: Model, tokens: int) -> BlockTable:
    table = BlockTable()
    model.pool.grow(table, tokens)
    return table


def play(model: Model) -> list[torch.Tensor]:
    """The logits of steps with all that a verify worker does: see the comments."""
    first, second = table_for(model, 80), table_for(model, 80)
    found = []
    # A prompt in two chunks, of which the second shares its step with another sequence.
    found.append(model.forward([Segment(PROMPT[:24], first, 0)]))
    first.kv_len = 24
    found.append(model.forward([Segment(PROMPT[24:], first, 1), Segment([5, 6, 7], second, 2)]))
    first.kv_len, second.kv_len = 40, 3
    # A chain whose last rows are rejected, and a tree.
    tree = [NO_PARENT, 0, 0, 1, 2, 4]
    found.append(
        model.forward(
            [Segment([9, 10, 11, 12], first, 4), Segment([8, 20, 21, 22, 23, 24], second, 6, tree)]
        )
    )
    first.kv_len += 2
    # Of the tree the path by the second child is kept; the next rows overwrite the others.
    model.keep_paths([(second, [0, 2, 4, 5])])
    second.kv_len += 4
    # A third sequence begins with the blocks of the first.
    third = BlockTable(first.blocks[:2], 32, 2)
    model.pool.grow(third, 48)
    found.append(
        model.forward(
            [Segment([30], first, 1), Segment([31, 32], second, 2), Segment([33, 34], third, 2)]
        )
    )
    return found


def generate(model: Model, steps: int) -> list[int | None]:
    """What greedy, drawn and constrained sequences say, one token a step each."""
    samplings = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=2**63 + 5),
        SamplingParams(temperature=0.8, seed=4, top_p=0.9),
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
    ]
    sequences = [[*PROMPT[: 10 + i]] for i in range(len(samplings))]
    tables = [table_for(model, 64) for _ in sequences]
    said: list[int | None] = []
    for _ in range(steps):
        segments = [
            Segment(tokens[table.kv_len :], table, 1)
            for tokens, table in zip(sequences, tables, strict=True)
        ]
        rows = [Row(s, list(t), (), 10) for s, t in zip(samplings, sequences, strict=True)]
        targets = model.score(segments, Choosing(rows, [], TOKENS)).targets
        for r, (tokens, table) in enumerate(zip(sequences, tables, strict=True)):
            token = targets[r]
            assert token is not None
            table.kv_len = len(tokens)
            tokens.append(token)
            said.append(token)
    return said


@pytest.fixture(scope="module")
def said(models: Path) -> Callable[[str], dict[str, list[int]]]:
    """What one rank says to a hundred requests without drafts, by family."""
    return cache(lambda family: say_hundred(Stepper(load_model(str(models / family)), **LIMITS)))


@pytest.mark.parametrize(
    ("family", "size", "forward"),
    [
        ("llama", 2, "auto"),
        ("llama", 4, "lean"),
        ("qwen3", 2, "module"),
        ("qwen3", 4, "lean"),
        ("gpt_neox", 2, "auto"),
        ("gpt_neox", 4, "auto"),
    ],
)
def test_several_ranks_say_what_one_says(
    models: Path,
    said: Callable[[str], dict[str, list[int]]],
    family: str,
    size: int,
    forward: str,
) -> None:
    one = alone(models / family, forward="lean" if forward == "auto" else forward)
    expected, tokens = play(one), generate(one, 12)
    assert len({*tokens}) > 8
    with running(models / family, size, forward=forward, blocks=96) as ranks:
        for found, wanted in zip(play(ranks.model), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert generate(ranks.model, 12) == tokens
        # With speculation on, eight sessions at once.
        worker = Stepper(ranks.model, **LIMITS)
        assert say_hundred(worker, said(family)) == said(family)
    assert len(said(family)) == 100
    assert max(len(plan.work) for plan in worker.plans) == 8
    speculation = worker.scheduler.counters.speculation
    assert speculation.accepted_tokens > 100
    assert speculation.draft_tokens > speculation.accepted_tokens + 20


def test_softcaps_and_sliding_windows_are_kept(models: Path) -> None:
    one = alone(models / "gemma2")
    with running(models / "gemma2", 2) as ranks:
        for found, wanted in zip(play(ranks.model), play(one), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_nine_heads_and_a_vocabulary_that_is_no_multiple_on_three_ranks(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=271,
        hidden_size=72,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=256,
        initializer_range=0.2,
        attention_bias=True,
        mlp_bias=True,
    )
    made: Any = AutoModelForCausalLM.from_config(config)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    made.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    one = alone(tmp_path)
    with running(tmp_path, 3) as ranks:
        for found, wanted in zip(play(ranks.model), play(one), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert generate(ranks.model, 12) == generate(one, 12)


def test_rows_are_whole_where_they_are_asked_for(models: Path) -> None:
    one = alone(models / "llama")
    rows = [Row(SamplingParams(temperature=0.0), PROMPT[: i + 1]) for i in range(4)]
    with running(models / "llama", 2) as ranks:
        expected, scores = (
            model.score(
                [Segment(PROMPT[:4], table_for(model, 4), 4)], Choosing(rows, [1, 2], TOKENS)
            )
            for model in (one, ranks.model)
        )
        torch.testing.assert_close(scores.logits(1, 3), expected.logits(1, 3), rtol=1e-4, atol=1e-5)
        assert [scores.targets[r] for r in range(4)] == [expected.targets[r] for r in range(4)]
        assert not scores.broken(0)
        with pytest.raises(KeyError):
            scores.logits(0, 1)
        # Nothing to run: the others are there all the same.
        ranks.model.pulse()
        with pytest.raises(ValueError, match="tree"):
            ranks.model.forward([Segment([1], table_for(ranks.model, 1), 1, [3])])
        # What was refused was never sent: the group is in step.
        torch.testing.assert_close(
            ranks.model.forward([Segment([1], table_for(ranks.model, 1), 1)]),
            one.forward([Segment([1], table_for(one, 1), 1)]),
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_lost_rank_fails_the_step_within_its_limit(models: Path, fault: str) -> None:
    limits = Limits(start_s=120.0, step_s=3.0)
    with running(models / "llama", 4 if fault == "killed" else 2, limits=limits) as ranks:
        segment = Segment([1], table_for(ranks.model, 1), 1)
        if fault == "killed":
            ranks.kill(1)
        else:
            ranks.stop_for_now(1)
        with pytest.raises(RankLostError, match=r"rank 0 of \d lost another one"):
            ranks.model.forward([segment])
        if fault == "killed":
            # The others end too.
            assert ranks.exits() == [-signal.SIGKILL, 1, 1]
        # Every later step fails at once.
        with pytest.raises(RankLostError, match="out of step"):
            ranks.model.forward([segment])
        with pytest.raises(RankLostError, match="out of step"):
            ranks.model.pulse()


def test_a_step_that_fails_on_rank_0_is_the_end_of_the_group(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(models / "llama", 2, limits=Limits(step_s=3.0)) as ranks:
        segment = Segment([1], table_for(ranks.model, 1), 1)

        def fail(*_: object) -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(ranks.model._member, "run", fail)
        with pytest.raises(MemoryError):
            ranks.model.forward([segment])
        with pytest.raises(RankLostError, match="no room"):
            ranks.model.forward([segment])
        assert ranks.exits() == [1]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"numerics": "invariant"}, "use --numerics fast"), ({"forward": "compiled"}, "split over")],
)
def test_what_is_not_kept_over_ranks_is_refused(
    models: Path, options: dict[str, str], words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words), running(models / "qwen3", 2, **options):
        pass
