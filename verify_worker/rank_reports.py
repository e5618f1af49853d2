"""What each rank tells of itself while it starts, and what rank 0 makes of that."""

import json
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Self

import torch

import outrider
from outrider.errors import ConfigError, OutriderError
from verify_worker.config import AUTO
from verify_worker.kv_memory import pool_blocks

# What of an error is told: with six bytes a character it still fits into a report.
_ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank has, as far as it has come; `error` says why it comes no further.

    `device` is one and the same only for ranks that share memory. `version` is Outrider's.
    `block_bytes` is what a block of KV takes on this rank, `budget_bytes` what it has for all.
    """

    rank: int
    host: str
    device: str = ""
    version: str = ""
    torch_version: str = ""
    fingerprint: str = ""
    weights_bytes: int = 0
    peak_bytes: int = 0
    block_bytes: int = 0
    budget_bytes: int = 0
    error: str = ""

    @classmethod
    def here(cls, rank: int, device: torch.device) -> Self:
        """That of a rank in this process which has not begun to load."""
        return cls(
            rank=rank,
            host=socket.gethostname(),
            device=device_identity(device),
            version=outrider.__version__,
            torch_version=str(torch.__version__),
        )

    def failed(self, error: Exception) -> Self:
        """The same of a rank that could not go on."""
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, OutriderError):
            text = error.message
        return replace(self, error=text[:_ERROR_CHARACTERS])

    def encode(self) -> bytes:
        """It as a message of less than `group.REPORT_BYTES`."""
        return json.dumps(asdict(self), ensure_ascii=False).encode(errors="replace")

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """The inverse of `encode`; of a rank of another version, what this one knows of it."""
        told = json.loads(message)
        return cls(**{each.name: told[each.name] for each in fields(cls) if each.name in told})

    @property
    def software(self) -> str:
        """What runs there."""
        return f"Outrider {self.version} with torch {self.torch_version}"

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def device_identity(device: torch.device) -> str:
    """A name of the memory that a device has; other processes have the same for the same.

    The number of a device says nothing: Ray shows each rank one GPU, as number 0.
    """
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return f"{socket.gethostname()}/{device.type}"


def compare(reports: Sequence[RankReport]) -> None:
    """Whether the ranks can be one model.

    Raises:
        ConfigError: one runs another version, has not loaded, or has other weights.
    """
    first = reports[0]
    for report in reports:
        if report.software != first.software:
            raise ConfigError(
                f"{report} runs {report.software}, {first} {first.software}: "
                "install the same everywhere"
            )
    for report in reports:
        if report.error:
            raise ConfigError(f"{report}: {report.error}")
    for report in reports:
        if report.fingerprint != first.fingerprint:
            raise ConfigError(
                f"{report} has other weights (fingerprint {report.fingerprint}) than {first} "
                f"({first.fingerprint}): give all hosts the same checkpoint"
            )


def agree(reports: Sequence[RankReport], most_blocks: int, kv_memory: str) -> int:
    """How many blocks of KV all ranks have: what the one with the least room can hold.

    Raises:
        ConfigError: they can't be one model, or one has no room for a block.
    """
    compare(reports)
    # What is free on a device is seen by each rank that is there.
    together = Counter(report.device for report in reports)
    shared = kv_memory == AUTO
    found = []
    for report in reports:
        budget = report.budget_bytes // (together[report.device] if shared else 1)
        found.append(pool_blocks(budget, report.block_bytes, most_blocks, kv_memory))
    return min(found)
