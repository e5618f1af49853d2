"""How a group over NCCL is made; torch's own is a pretended one here."""

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from outrider.model.parallel import nccl

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Group:
    """What torch has, as far as it is used."""

    Options = SimpleNamespace

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.handling = os.environ.get(HANDLING)
        self.most_s = options._timeout.total_seconds()
        self.device: torch.device | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Device 0 connects, 1 never does, 2 fails."""
        if device.index == 1:
            threading.Event().wait(60)  # one of the others never comes
        if device.index == 2:
            raise RuntimeError("unhandled system error")
        self.device = device


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    def entered(_device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch.cuda, "device", entered)


def connected(index: int, start_s: float = 60.0) -> Any:
    return nccl.connect(None, 0, 2, torch.device("cuda", index), start_s, 125.0)


@pytest.mark.parametrize("before", [None, "1"])
def test_errors_are_left_to_us_by_this_group_alone(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv(HANDLING, raising=False)
    if before is not None:
        monkeypatch.setenv(HANDLING, before)
    group = connected(0)
    assert (group.handling, group.most_s) == ("0", 125)
    assert os.environ.get(HANDLING) == before


def test_it_is_connected_when_it_is_made() -> None:
    assert connected(0).device == torch.device("cuda", 0)


def test_connecting_has_an_end() -> None:
    with pytest.raises(TimeoutError, match="NCCL does not connect"):
        connected(1, start_s=0.05)


def test_what_goes_wrong_while_connecting_is_told() -> None:
    with pytest.raises(RuntimeError, match="unhandled system error"):
        connected(2)
