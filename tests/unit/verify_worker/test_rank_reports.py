"""What ranks tell of themselves, and what rank 0 makes of it."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import outrider
from outrider.errors import ConfigError
from outrider.model.parallel.group import REPORT_BYTES
from verify_worker.rank_reports import RankReport, agree, device_identity

CPU = torch.device("cpu")


def report(rank: int, **fields: Any) -> RankReport:
    values = {"fingerprint": "f", "block_bytes": 100, "budget_bytes": 10_000, **fields}
    return replace(RankReport.here(rank, CPU), **{"host": "h", **values})


def test_ranks_agree_on_the_least() -> None:
    reports = [report(0), report(1, budget_bytes=700), report(2, block_bytes=50)]
    assert agree(reports, 1000, "1MiB") == 7
    assert agree(reports, 5, "1MiB") == 5
    with pytest.raises(ConfigError, match="a block of KV takes"):
        agree([report(0), report(1, budget_bytes=10)], 1000, "1MiB")
    with pytest.raises(ConfigError, match="rank 1 on h: no file"):
        agree([report(0), replace(report(1), error="no file")], 1000, "1MiB")


def test_what_is_free_is_there_once_for_all_ranks_of_a_device() -> None:
    assert agree([report(0), report(1)], 1000, "auto") == 50
    assert agree([report(0), report(1, device="other/cpu")], 1000, "auto") == 100
    # Named sizes are for each rank.
    assert agree([report(0), report(1)], 1000, "1MiB") == 100


def test_ranks_with_a_gpu_each_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # As Ray has it: each process sees one GPU, which it calls the first.
    identities = []
    for uuid in ("GPU-a", "GPU-b"):
        properties = SimpleNamespace(uuid=uuid)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        identities.append(device_identity(torch.device("cuda", 0)))
    assert identities == ["GPU-a", "GPU-b"]
    reports = [report(rank, device=identity) for rank, identity in enumerate(identities)]
    assert agree(reports, 1000, "auto") == 100


@pytest.mark.parametrize("field", ["version", "torch_version"])
def test_ranks_of_different_versions_are_refused_with_both(field: str) -> None:
    own = getattr(report(0), field)
    assert own == {"version": outrider.__version__, "torch_version": torch.__version__}[field]
    # An error may come of it, and does not hide it.
    other = report(1, error="no such field", **{field: "0.0.1"})
    with pytest.raises(ConfigError, match=r"rank 1 on h runs .*0\.0\.1.*rank 0 on h Outrider") as e:
        agree([report(0), other], 1000, "auto")
    assert own in e.value.message


def test_reports_fit_whatever_went_wrong_and_are_read_across_versions() -> None:
    for character in ("\x00", "\U0001f600", "\ud800", '"'):
        message = report(1).failed(KeyError(character * 10_000)).encode()
        assert len(message) <= REPORT_BYTES
        assert RankReport.decode(message).error.startswith("KeyError: ")
    told = {"rank": 1, "host": "h", "version": "9", "unheard_of": 1}
    found = RankReport.decode(json.dumps(told).encode())
    assert found == RankReport(rank=1, host="h", version="9")
