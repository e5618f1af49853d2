"""A target that is split: all ranks load, agree, and run the steps of one worker."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.cli import main
from outrider.errors import ConfigError, InternalError, RankLostError, UnsupportedModelError
from outrider.messages import Draft, Endings, SamplingParams, SpeculationOptions
from outrider.model.blocks import BlockTable
from outrider.model.linears.install import require_weights
from outrider.model.memory_plan import plan_memory
from outrider.model.paged import PagedModel
from outrider.model.parallel.leader import ParallelModel
from outrider.model.parallel.shards import Shard, load_shard
from outrider.model.tensors import unpacked
from tests.support.gguf_files import LINEARS, Shape, write_llama
from tests.support.models import CONTEXT, save_model, save_tokenizer
from tests.support.ranks import ForkedRanks, page_bytes
from verify_worker import ranks as ranks_module
from verify_worker.config import Settings
from verify_worker.ranks import RankJob
from verify_worker.state import Decided, Plan, Session, Work
from verify_worker.target import Target, load_target

PROMPT = [(7 * i) % 251 for i in range(40)]


def settings(model: Path, **fields: Any) -> Settings:
    values = {"kv_memory": "1MiB", "calibrate": False, "tensor_parallel_size": 2, **fields}
    return Settings(model=str(model), redis_url="", forward="lean", **values)


class Nobody(ForkedRanks):
    """Ranks that are never there."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[RankJob] = []

    def run(self, job: RankJob) -> None:
        self.jobs.append(job)


@contextmanager
def loaded(model: Path, ranks: ForkedRanks, **fields: Any) -> Iterator[Target]:
    try:
        target = load_target(settings(model, **fields), ranks)
        yield target
        if isinstance(target.model, ParallelModel):
            target.model.stop()
            ended = ", ".join("0" for _ in ranks.others)
            assert ranks.loss() == f"exit codes [{ended}]"
    finally:
        ranks.clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def verified(target: Target) -> Decided:
    """The verdict on a draft after a prompt, with hidden states."""
    session = Session(
        session_id="s",
        epoch=1,
        owner=0,
        tokens=PROMPT,
        prompt_len=len(PROMPT),
        sampling=SamplingParams(temperature=1.0, seed=3),
        endings=Endings(8),
        speculation=SpeculationOptions(),
        table=BlockTable(),
    )
    target.model.pool.grow(session.table, len(PROMPT) + 2)
    work = Work(session, len(PROMPT), Draft((5, 6)), keeps_hidden=True)
    (result,) = target.runner.run(Plan((work,))).results
    assert isinstance(result, Decided)
    return result


def allocated(target: Target, ranks: ForkedRanks | None = None) -> list[int]:
    """Bytes of the pages of every rank."""
    model = target.model
    own = model._member.paged if isinstance(model, ParallelModel) else model
    assert isinstance(own, PagedModel)
    return [page_bytes(own), *(ranks.page_bytes() if ranks else [])]


def test_a_split_target_is_what_the_plan_says_and_says_what_a_whole_one_says(model: Path) -> None:
    # On four ranks two have one KV head.
    plan = plan_memory(str(model), 4, 2**20, dtype="float32")
    whole = load_target(settings(model, tensor_parallel_size=1))
    ranks = ForkedRanks()
    memory = str(plan.ranks[0].kv_bytes)
    with loaded(model, ranks, kv_memory=memory, tensor_parallel_size=4) as target:
        assert isinstance(target.model, ParallelModel)
        assert target.model.pool.total == plan.blocks
        assert [rank.weights_bytes for rank in plan.ranks] == [
            report.weights_bytes for report in target.reports
        ]
        assert [rank.block_bytes for rank in plan.ranks] == [
            report.block_bytes for report in target.reports
        ]
        pages = allocated(target, ranks)
        assert pages == [rank.block_bytes * plan.blocks for rank in plan.ranks]
        # Each of two KV heads is there twice.
        (of_whole,) = allocated(whole)
        assert sum(pages) / plan.blocks == 2 * of_whole / whole.model.pool.total
        # No rank ever holds the whole of it.
        all_bytes = plan_memory(str(model), 1, 2**20, dtype="float32").ranks[0].weights_bytes
        assert max(report.peak_bytes for report in target.reports) < 0.6 * all_bytes
        assert (target.fingerprint, target.numerics) == (whole.fingerprint, whole.numerics)
        found, expected = verified(target), verified(whole)
        assert found.verdict == expected.verdict
        # What draft models read is there on rank 0.
        assert found.hidden is not None
        assert expected.hidden is not None
        assert found.hidden.shape == (len(found.verdict.token_ids), 32)
        pair = unpacked(found.hidden), unpacked(expected.hidden)
        torch.testing.assert_close(*pair, rtol=0.02, atol=0.02)


@pytest.fixture(scope="module")
def like_70b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads and ratios of Llama 3 70B, with heads of 4, two layers and few tokens."""
    torch.manual_seed(0)
    config: Any = LlamaConfig(
        hidden_size=64 * 4,
        intermediate_size=64 * 4 * 7 // 2,
        num_hidden_layers=2,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=4,
        vocab_size=256 + 16,
        max_position_embeddings=CONTEXT,
    )
    where = tmp_path_factory.mktemp("like-70b")
    LlamaForCausalLM(config).save_pretrained(where)
    save_tokenizer(where)
    return where


@pytest.mark.parametrize("size", [4, 8])
def test_what_is_printed_for_the_shape_of_70b_is_allocated(like_70b: Path, size: int) -> None:
    flags = ("--tensor-parallel-size", f"{size}", "--gpu-memory", "4MiB", "--dtype", "float32")
    printed = CliRunner().invoke(main, ["plan", "--model", str(like_70b), *flags, "--json"])
    plan = json.loads(printed.stdout)
    memory = str(plan["ranks"][0]["kv_bytes"])
    ranks = ForkedRanks()
    # So many that their contexts hold all blocks.
    fields = {"tensor_parallel_size": size, "max_sessions": 256}
    with loaded(like_70b, ranks, kv_memory=memory, **fields) as target:
        assert len(target.reports) == size
        for name in ("weights_bytes", "block_bytes"):
            assert [rank[name] for rank in plan["ranks"]] == [
                getattr(report, name) for report in target.reports
            ]
        assert target.model.pool.total == plan["kv_blocks"]
        assert allocated(target, ranks) == [
            rank["block_bytes"] * plan["kv_blocks"] for rank in plan["ranks"]
        ]


def test_a_split_gguf_file_stays_packed_and_is_what_the_plan_says(tmp_path: Path) -> None:
    shape = Shape(heads=6, kv_heads=6, hidden=192, inner=192, vocabulary=288)
    kinds = {"token_embd": "Q8_0", **dict.fromkeys(LINEARS.values(), "Q4_0")}
    path = write_llama(tmp_path / "tiny.gguf", kinds, shape)
    unpacked, plan = (
        plan_memory(str(path), 2, 2**21, dtype="float32", packed=packed) for packed in (False, True)
    )
    whole = load_target(settings(path, tensor_parallel_size=1))
    memory = str(plan.ranks[0].kv_bytes)
    ranks = ForkedRanks()
    with loaded(path, ranks, kv_memory=memory, tensor_parallel_size=2) as target:
        reports = target.reports
        assert [rank.weights_bytes for rank in plan.ranks] == [r.weights_bytes for r in reports]
        assert [rank.block_bytes for rank in plan.ranks] == [r.block_bytes for r in reports]
        assert target.model.pool.total == plan.blocks
        pages = allocated(target, ranks)
        assert pages == [rank.block_bytes * plan.blocks for rank in plan.ranks]
        (of_whole,) = allocated(whole)
        assert sum(pages) / plan.blocks == of_whole / whole.model.pool.total
        # The embedding is not packed.
        assert plan.ranks[0].weights_bytes < unpacked.ranks[0].weights_bytes / 2
        assert target.dtype == whole.dtype == "float32-packed"
        assert (target.fingerprint, target.numerics) == (whole.fingerprint, whole.numerics)
        assert verified(target).verdict == verified(whole).verdict


def test_ranks_with_other_weights_are_refused(model: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path, seed=1)
    ranks = ForkedRanks({1: {"model": str(other)}})
    with pytest.raises(ConfigError, match=r"rank 1 on .* has other weights"), loaded(model, ranks):
        pass


def test_a_rank_without_the_checkpoint_is_named(model: Path, tmp_path: Path) -> None:
    ranks = ForkedRanks({1: {"model": str(tmp_path / "nothing")}})
    with pytest.raises(ConfigError, match=r"rank 1 on .*: no model at"), loaded(model, ranks):
        pass


def test_a_rank_that_ends_before_it_joins_is_told_at_once(model: Path) -> None:
    # Longer than tests may take.
    assert settings(model).rank_start_s > 200
    ranks = ForkedRanks({1: {"model": ""}})
    told = r"a rank ended before all had met \(exit codes \[3\]\)"
    with pytest.raises(RankLostError, match=told), loaded(model, ranks):
        pass


def test_ranks_that_never_come_are_given_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Nobody()
    monkeypatch.chdir(model.parent)
    told = pytest.raises(RankLostError, match=r"did not meet all others within 1 s")
    with told, loaded(Path(model.name), ranks, rank_start_s=1.0):
        pass
    # They may run in another directory.
    assert [job.model for job in ranks.jobs] == [str(model)]


def test_what_can_not_be_split_is_refused_by_all(tmp_path: Path) -> None:
    model = save_model(tmp_path, "gpt2")
    ranks = ForkedRanks()
    refused = pytest.raises(UnsupportedModelError, match="no tensor-parallel plan")
    with refused, loaded(model, ranks):
        pass


def test_any_fault_of_loading_is_told_by_its_rank(model: Path) -> None:
    ranks = ForkedRanks({1: {"model": None}})
    told = pytest.raises(ConfigError, match=r"rank 1 on .*: TypeError: .*NoneType")
    with told, loaded(model, ranks):
        pass


def test_what_is_free_is_looked_at_when_weights_are_laid_out(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards: list[Shard] = []
    budgets: list[str] = []

    def load(*arguments: Any, **options: Any) -> Shard:
        shards.append(load_shard(*arguments, **options))
        return shards[-1]

    def budget(wanted: str, device: torch.device) -> int:
        budgets.append(f"{wanted} on {device}")
        # Laid out anew, weights are the module's no more.
        with pytest.raises(InternalError):
            require_weights(shards[0].model.module)
        return 2**20

    monkeypatch.setattr(ranks_module, "load_shard", load)
    monkeypatch.setattr(ranks_module, "budget_bytes", budget)
    with loaded(model, ForkedRanks(), kv_memory="auto") as target:
        # The other rank, a process of its own, has more.
        assert target.model.pool.total == 2**20 // 2 // target.reports[0].block_bytes
    assert budgets == ["auto on cpu"]


def test_how_many_sessions_a_worker_serves_well(model: Path) -> None:
    # Of 256 blocks a session of the whole context takes 16.
    target = load_target(settings(model, tensor_parallel_size=1))
    assert (target.model.pool.total, CONTEXT) == (256, 256)
    assert target.weight == 16
    assert load_target(settings(model, tensor_parallel_size=1, max_sessions=3)).weight == 3
