"""Attention of all rows of a step in one kernel over all pages: `flex_attention` on CUDA.

Queries of every sequence go in as one row of N, keys and values as all pages at once; which
slots a query sees is a mask over (query, slot), from which the kernel skips whole blocks. On a
CPU this would look at every page, so that `PagedAttention` serves there.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from outrider.errors import ConfigError
from outrider.model.attention import How
from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.paged_attention import PagedAttention, StepAttention, visible
from outrider.model.pages import KvPages
from outrider.model.rows import Span

SDPA = "sdpa"
FLEX = "flex"
ATTENTIONS = (SDPA, FLEX)

AttentionKind = Callable[[KvPages, Sequence[Span]], StepAttention]


def choose_attention(name: str, device: torch.device) -> AttentionKind:
    """The attention over pages of that name.

    Raises:
        ConfigError: flex can't run here; the message says why.
    """
    if name == SDPA:
        return PagedAttention
    missing = ""
    if device.type != "cuda":
        missing = f"needs a CUDA device, and the model runs on {device.type}"
    elif importlib.util.find_spec("triton") is None:
        missing = "needs the package triton to compile its kernel"
    if missing:
        raise ConfigError(f"--attention {FLEX} {missing}; use --attention {SDPA}")
    compiled = torch.compile(flex.flex_attention, dynamic=True)
    return lambda pages, spans: FlexAttention(pages, spans, compiled)


class FlexAttention:
    """The attention of one step; `kernel` is `flex_attention`, compiled or not."""

    def __init__(self, pages: KvPages, spans: Sequence[Span], kernel: Callable[..., Any]) -> None:
        self._pages = pages
        self._kernel = kernel
        self._spans = spans
        slots = [span.slot(i) for span in spans for i in range(span.start, span.context)]
        self.slots = torch.tensor(slots, device=pages.device)
        self._masks: dict[int | None, Any] = {}

    def keep(self, layer: int, kv: torch.Tensor) -> None:
        """Write the keys and values of the step's rows, side by side: [N, Hkv * D + Hkv * Dv]."""
        self._pages.rows[layer].index_copy_(0, self.slots, kv)

    def attend(self, layer: int, q: torch.Tensor, how: How) -> torch.Tensor:
        """q [N, H, D] over the pages, which hold the KV of its rows already: [N, H, Dv]."""
        keys, values = (
            kept[layer].transpose(0, 1)[None] for kept in (self._pages.keys, self._pages.values)
        )
        result: torch.Tensor = self._kernel(
            q.transpose(0, 1)[None],
            keys,
            values,
            score_mod=None if how.softcap is None else _capped(how.softcap),
            block_mask=self._mask(how.window),
            scale=how.scaling,
            enable_gqa=q.shape[1] != keys.shape[1],
        )
        return result[0].transpose(0, 1)

    def _mask(self, window: int | None) -> Any:
        """Which slots each row sees, as a block mask; one a window and step."""
        if window not in self._masks:
            device, slots = self._pages.device, len(self._pages.rows[0])
            seen = torch.zeros(len(self.slots), slots, dtype=torch.bool, device=device)
            for span in self._spans:
                columns = _slots(span, device)
                rows = visible(span, window, device)
                seen[span.begin : span.end, columns] = True if rows is None else rows
            self._masks[window] = flex.create_block_mask(
                lambda batch, head, row, slot: seen[row, slot],
                None,
                None,
                len(seen),
                slots,
                device=device,
            )
        return self._masks[window]


def _slots(span: Span, device: torch.device) -> torch.Tensor:
    """The slots of the context of a span, in order."""
    blocks = torch.tensor(span.blocks, device=device)
    slots = blocks[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=device)
    return slots.flatten()[: span.context]


def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def score(score: torch.Tensor, batch: Any, head: Any, row: Any, slot: Any) -> torch.Tensor:
        return torch.tanh(score / softcap) * softcap

    return score
