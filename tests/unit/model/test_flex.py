"""Attention in one kernel against attention sequence by sequence; the kernel runs uncompiled."""

from collections.abc import Sequence

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from outrider.errors import ConfigError
from outrider.model.attention import How
from outrider.model.flex import ATTENTIONS, FlexAttention, choose_attention
from outrider.model.paged_attention import PagedAttention
from outrider.model.pages import KvPages
from outrider.model.rows import NO_PARENT, Span

HEADS, KV_HEADS, SIZE = 4, 2, 16
# A decoding step, a tree after a shared block, a prefill chunk, and a chain over scattered blocks.
SPANS = [
    Span(0, 1, 20, [3, 4]),
    Span(1, 6, 18, [3, 7], parents=(NO_PARENT, 0, 0, 1)),
    Span(6, 26, 0, [1, 2]),
    Span(26, 29, 33, [9, 5, 8]),
]


def pages() -> KvPages:
    kept = KvPages([(KV_HEADS, SIZE, SIZE)], 10, dtype=torch.float32, device=torch.device("cpu"))
    kept.rows[0].copy_(torch.randn(kept.rows[0].shape, generator=torch.Generator().manual_seed(0)))
    return kept


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "how", [How(0.25, None, None), How(0.25, 7, None), How(0.25, None, 3.0), How(0.25, 7, 3.0)]
)
@pytest.mark.parametrize("spans", [SPANS, SPANS[:1]])
def test_one_kernel_sees_what_each_sequence_sees(how: How, spans: Sequence[Span]) -> None:
    rows = spans[-1].end
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(rows, HEADS, SIZE, generator=generator)
    kv = torch.randn(rows, 2 * KV_HEADS * SIZE, generator=generator)
    expected, actual = (
        attend(make(pages(), spans), kv, q, how)
        for make in (PagedAttention, lambda kept, them: FlexAttention(kept, them, flex_attention))
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def attend(
    attention: PagedAttention | FlexAttention, kv: torch.Tensor, q: torch.Tensor, how: How
) -> torch.Tensor:
    attention.keep(0, kv)
    return attention.attend(0, q, how)


def test_a_machine_without_the_kernel_is_told_so() -> None:
    cpu = torch.device("cpu")
    assert choose_attention("sdpa", cpu) is PagedAttention
    with pytest.raises(ConfigError, match="flex needs a CUDA device, and the model runs on cpu"):
        choose_attention("flex", cpu)
    assert ATTENTIONS == ("sdpa", "flex")
