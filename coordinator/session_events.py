"""What a running session is told, and how it hands out what it has committed."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from coordinator.commit import Piece
from coordinator.decode_link import DecodeLink, LinkLost
from outrider.errors import OutriderError
from outrider.messages import DecodeEvent


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the session from outside: as cancelled, or with an error."""

    error: OutriderError | None


@dataclass(frozen=True, slots=True)
class Move:
    """Asks for another verify worker than that of `link`."""

    link: DecodeLink


Event: TypeAlias = DecodeEvent | LinkLost | Stop | Move
# (completion tokens before the pieces, pieces)
Emit: TypeAlias = Callable[[int, list[Piece]], Awaitable[None]]
