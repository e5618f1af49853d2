"""Ranks on CUDA devices, over NCCL: only where there are some."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

from outrider.errors import RankLostError
from outrider.model.blocks import BlockTable
from outrider.model.loading import load_model
from outrider.model.numerics import choose_numerics
from outrider.model.paged import PagedModel, Segment
from outrider.model.parallel.group import Limits, RankGroup
from outrider.model.parallel.leader import ParallelModel
from tests.support.models import save_model
from tests.support.ranks import alone, running

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
PROMPT = [(7 * i) % 251 for i in range(40)]
# More than a second on any device, in its own clock's turns.
LONG = 10**10


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("models") / "llama"
    save_model(where)
    return where


def group_of_one(where: Path, limits: Limits) -> RankGroup:
    device = torch.device("cuda", 0)
    return RankGroup.join(FileStore(str(where / "store"), 1), 0, 1, device=device, limits=limits)


def logits(model: PagedModel | ParallelModel) -> list[torch.Tensor]:
    """Of a prompt in two chunks, and of a token behind it."""
    table = BlockTable()
    model.pool.grow(table, len(PROMPT) + 1)
    found = []
    for tokens in (PROMPT[:24], PROMPT[24:], [5]):
        found.append(model.forward([Segment(tokens, table, 1)]).cpu())
        table.kv_len += len(tokens)
    return found


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def test_sums_and_gathers_over_nccl(tmp_path: Path) -> None:
    group = group_of_one(tmp_path, Limits())
    with group.watched(starting=True):
        total = group.total(torch.full((2, 3), 2.0, device=group.device))
        parts = group.gather(torch.arange(6, device=group.device).view(2, 3)[:, 1:])
    assert total.tolist() == [[2.0] * 3] * 2
    assert parts is not None
    assert [part.tolist() for part in parts] == [[[1, 2], [4, 5]]]
    group.fail("that was all")
    with pytest.raises(RankLostError, match="that was all"):
        group.total(torch.ones(1, device=group.device))


def test_a_device_that_stands_still_is_noticed(tmp_path: Path) -> None:
    group = group_of_one(tmp_path, Limits(step_s=0.2))
    cuda: Any = torch.cuda  # it has no hints

    def step() -> None:
        with group.watched():
            cuda._sleep(LONG)
            group.total(torch.ones(4, device=group.device))

    with pytest.raises(RankLostError, match=r"device stood still for more than 0\.2 s"):
        step()
    # This process and its device go on.
    cuda.synchronize()
    assert torch.ones(2, device=group.device).sum().item() == 2


def test_a_model_on_cuda_computes_what_it_does_on_a_cpu(path: Path) -> None:
    model = load_model(str(path), device="cuda")
    paged = PagedModel(model, 64, choose_numerics("fast", model, forward="lean"))
    assert_close(logits(paged), logits(alone(path)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device at most")
def test_two_ranks_on_two_devices(path: Path) -> None:
    with running(path, 2, device="cuda", forward="lean") as ranks:
        with ranks.model.starting():
            first = logits(ranks.model)
        assert_close(first, logits(alone(path)))
        ranks.model.pulse()
