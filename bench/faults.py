"""Ways in which pages can be wrong about a model: the test of the check at start.

Each patches the attention over pages; `mock.patch` objects are entered with `with`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from outrider.model import fast
from outrider.model.pages import BlockIndex, KvPages
from outrider.model.rows import Span

Fault = Callable[[], AbstractContextManager[Any]]


def causality() -> AbstractContextManager[Any]:
    """Every row sees all that is kept."""
    return mock.patch.object(fast, "visible", return_value=None)


def no_window() -> AbstractContextManager[Any]:
    """A sliding window is not applied."""
    visible = fast.visible

    def wrong(span: Span, window: int | None, device: torch.device) -> torch.Tensor | None:
        return visible(span, None, device)

    return mock.patch.object(fast, "visible", wrong)


def short_window() -> AbstractContextManager[Any]:
    """A sliding window lacks its last token."""
    visible = fast.visible

    def wrong(span: Span, window: int | None, device: torch.device) -> torch.Tensor | None:
        return visible(span, window and window - 1, device)

    return mock.patch.object(fast, "visible", wrong)


def lost_token() -> AbstractContextManager[Any]:
    """The newest token from before a step is not seen."""
    visible = fast.visible

    def wrong(span: Span, window: int | None, device: torch.device) -> torch.Tensor | None:
        mask = visible(span, window, device)
        if mask is not None and span.start:
            mask[:, span.start - 1] = False
        return mask

    return mock.patch.object(fast, "visible", wrong)


def scaling() -> AbstractContextManager[Any]:
    """Scores are twice what they should be."""
    return _changed(scaling=lambda scaling: 2 * scaling)


def no_softcap() -> AbstractContextManager[Any]:
    """A soft cap is not applied."""
    return _changed(softcap=lambda _: None)


def positions() -> AbstractContextManager[Any]:
    """Positions are off by one after the first chunk."""
    right = vars(Span)["positions"].func

    def wrong(span: Span) -> list[int]:
        return [position + bool(span.start) for position in right(span)]

    return mock.patch.object(Span, "positions", property(wrong))


def neighbour() -> AbstractContextManager[Any]:
    """Block 1 is read where block 0 should be."""
    right = KvPages.block_index

    def wrong(pages: KvPages, span: Span) -> BlockIndex:
        scattered = not isinstance(right(pages, span), slice)
        blocks = [1, *span.blocks[1:]] if scattered and span.blocks[0] == 0 else span.blocks
        return right(pages, replace(span, blocks=blocks))

    return mock.patch.object(KvPages, "block_index", wrong)


def _changed(**change: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Attention with other values in its `How`."""
    right: Any = fast.attention

    def wrong(*arguments: Any) -> torch.Tensor:
        *tensors, how = arguments
        values = {name: new(getattr(how, name)) for name, new in change.items()}
        result: torch.Tensor = right(*tensors, replace(how, **values))
        return result

    return mock.patch.object(fast, "attention", wrong)


FAULTS: dict[str, Fault] = {
    "causality": causality,
    "no window": no_window,
    "short window": short_window,
    "lost token": lost_token,
    "scaling": scaling,
    "no soft cap": no_softcap,
    "positions": positions,
    "neighbour": neighbour,
}
