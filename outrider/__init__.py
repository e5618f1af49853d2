"""Outrider: distributed speculative decoding for large language models.

Importing this package loads neither torch nor redis, and what it gives only when it is used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.client import AsyncClient, Chunk, Client, Completion, Piece
    from outrider.errors import OutriderError
    from outrider.tls import Tls

    __version__: str

_MODULES = {
    "AsyncClient": "outrider.client",
    "Chunk": "outrider.client",
    "Client": "outrider.client",
    "Completion": "outrider.client",
    "OutriderError": "outrider.errors",
    "Piece": "outrider.client",
    "Tls": "outrider.tls",
}
__all__ = [
    "AsyncClient",
    "Chunk",
    "Client",
    "Completion",
    "OutriderError",
    "Piece",
    "Tls",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("outrider")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+source"
