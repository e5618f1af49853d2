"""Outrider: distributed speculative decoding for large language models.

Importing this package loads neither torch nor redis.
"""

from importlib.metadata import PackageNotFoundError, version

from outrider.client import AsyncClient, Chunk, Client, Completion, Piece
from outrider.errors import OutriderError

try:
    __version__ = version("outrider")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"
__all__ = [
    "AsyncClient",
    "Chunk",
    "Client",
    "Completion",
    "OutriderError",
    "Piece",
    "__version__",
]
