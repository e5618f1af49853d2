"""What can't be kept over several ranks is refused before anything starts."""

from typing import Any

import pytest

from outrider.errors import ConfigError
from verify_worker.config import Settings


def settings(size: int, **fields: Any) -> Settings:
    return Settings(model="m", redis_url="redis://r", tensor_parallel_size=size, **fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"device": "cuda:1"}, "--device cuda:1 can't be had over 2 ranks.*use --device cuda,"),
        ({"device": "mps"}, "--device mps can't be had over 2 ranks"),
        ({"numerics": "invariant"}, "not kept over 2 ranks.*use --numerics fast"),
        ({"forward": "compiled"}, "can't be split over 2 ranks.*use --forward auto"),
    ],
)
def test_what_can_not_be_split(fields: dict[str, Any], told: str) -> None:
    settings(1, **fields)
    with pytest.raises(ConfigError, match=told):
        settings(2, **fields)


def test_what_can_be_split() -> None:
    for device in ("cpu", "cuda"):
        for forward in ("auto", "lean", "module"):
            settings(2, device=device, forward=forward)
