"""Ways in which pages can be wrong about a model: the test of the check at start.

Each patches the attention over pages; `mock.patch` objects are entered with `with`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from outrider.model import paged_attention
from outrider.model.attention import How
from outrider.model.paged_attention import PagedAttention
from outrider.model.pages import KvPages, Where
from outrider.model.rows import Span

Fault = Callable[[], AbstractContextManager[Any]]


def causality() -> AbstractContextManager[Any]:
    """Every row sees all that is kept."""
    return mock.patch.object(paged_attention, "visible", return_value=None)


def no_window() -> AbstractContextManager[Any]:
    """A sliding window is not applied."""
    visible = paged_attention.visible

    def wrong(span: Span, window: int | None, device: torch.device) -> torch.Tensor | None:
        return visible(span, None, device)

    return mock.patch.object(paged_attention, "visible", wrong)


def short_window() -> AbstractContextManager[Any]:
    """A sliding window lacks its last token."""
    visible = paged_attention.visible

    def wrong(span: Span, window: int | None, device: torch.device) -> torch.Tensor | None:
        return visible(span, window and window - 1, device)

    return mock.patch.object(paged_attention, "visible", wrong)


def lost_token() -> AbstractContextManager[Any]:
    """The newest token from before a step is not seen."""
    visible = paged_attention.visible

    def wrong(span: Span, window: int | None, device: torch.device) -> torch.Tensor | None:
        mask = visible(span, window, device)
        if mask is not None and span.start:
            mask[:, span.start - 1] = False
        return mask

    return mock.patch.object(paged_attention, "visible", wrong)


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
    right = KvPages.where

    def wrong(pages: KvPages, span: Span, begin: int, end: int) -> Where:
        # Block 0 belongs to the sequence that is checked.
        blocks = [1, *span.blocks[1:]] if span.blocks[0] == 0 else span.blocks
        return right(pages, replace(span, blocks=blocks), begin, end)

    return mock.patch.object(KvPages, "where", wrong)


def _changed(**change: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Attention with other values in its `How`."""
    right = PagedAttention.attend

    def wrong(self: PagedAttention, layer: int, q: torch.Tensor, how: How) -> torch.Tensor:
        values = {name: new(getattr(how, name)) for name, new in change.items()}
        return right(self, layer, q, replace(how, **values))

    return mock.patch.object(PagedAttention, "attend", wrong)


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
