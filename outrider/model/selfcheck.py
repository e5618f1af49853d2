"""At start: does the paged forward agree with the model's own? A model that has something
that paging does not know (a recurrent state, its own mask, unusual positions) fails here.

How far rounding alone takes the two apart depends on the type and the model: in bfloat16 it is
1% of the logits on a model of two layers and 4% on one of thirty. So it is measured: the model's
own forward is run again with attention in float32 and one more rounding at the end of each
layer's attention. Right models came out at 0 to 1.6 times that, in all three types; what faults
come to is in docs/exactness.md.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from outrider.errors import UnsupportedModelError
from outrider.model.attention import NAME
from outrider.model.blocks import BLOCK_TOKENS, BlockTable
from outrider.model.loading import LoadedModel
from outrider.model.paged import PagedModel, Segment

# Past two blocks, so that tables and offsets are exercised.
PROBE_TOKENS = 2 * BLOCK_TOKENS + 5
_MAX_WINDOW = 512
# Rows are compared in two places: early, where a token more or less matters most, and last.
_EARLY = 5
_COMPARED = 4
_MIN_TOKENS = _EARLY + 2 * _COMPARED
# How many times what rounding does is still rounding. The finer the type, the more room is
# left below the smallest fault.
LIMITS = {torch.float32: 64.0, torch.float16: 12.0, torch.bfloat16: 4.0}
# Logits that rounding takes further apart than this can't be checked with that type.
_MAX_DIFFERENCE = 0.5
_ROUNDED = "outrider_rounded"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far the paged forward is from the model's own, and how far rounding alone is."""

    difference: float
    rounding: float

    @property
    def ratio(self) -> float:
        """The difference in units of what rounding does."""
        return self.difference / self.rounding


def check_paged_forward(model: LoadedModel, paged: PagedModel) -> Comparison | None:
    """Compare the two; None where the context or the pool is too small for it.

    Raises:
        UnsupportedModelError: they differ by more than rounding.
    """
    length = _probe_length(model)
    if length < _MIN_TOKENS or paged.pool.free < 2 * -(-(length + 1) // BLOCK_TOKENS):
        return None
    found = compare(model, paged)
    most = min(LIMITS[model.module.dtype] * found.rounding, _MAX_DIFFERENCE)
    if not found.difference <= most:
        raise UnsupportedModelError(
            f"{model.name} can't be served exactly: between its own forward and the paged one its "
            f"logits differ by {found.difference:.2g}, where rounding makes {found.rounding:.2g}. "
            f"Its attention ({model.module.config.model_type}) has something that paging lacks"
        )
    return found


def compare(model: LoadedModel, paged: PagedModel) -> Comparison:
    """Compare the two on fixed tokens, at the place where they are furthest apart.

    The tokens go in as prefill chunks, rejected drafts and verifications, beside another
    sequence. The difference of rows is that of their centred logits, relative (L2).
    """
    length = _probe_length(model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocab_size, (length,), generator=generator).tolist()
    expected = _own_forward(model, tokens, "eager")
    rounded = _own_forward(model, tokens, _ROUNDED)
    least = torch.finfo(model.module.dtype).eps / 4  # where attention hardly matters
    places = [
        Comparison(_difference(actual, own), max(_difference(near, own), least))
        for own, near, actual in zip(expected, rounded, _paged_forward(paged, tokens), strict=True)
    ]
    return max(places, key=lambda place: place.ratio)


def _probe_length(model: LoadedModel) -> int:
    """Long enough to pass a sliding window where that is cheap."""
    window = getattr(model.module.config.get_text_config(), "sliding_window", None) or 0
    wanted = window + PROBE_TOKENS if window <= _MAX_WINDOW else PROBE_TOKENS
    return min(wanted, model.context_len - 1)


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The L2 norm of the difference of [R, V] logits over that of `expected`, rows centred."""
    difference = actual - expected
    centred = [x - x.mean(-1, keepdim=True) for x in (difference, expected)]
    return float(centred[0].norm() / centred[1].norm().clamp_min(1e-12))


@torch.inference_mode()
def _own_forward(
    model: LoadedModel, tokens: list[int], attention: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the early and the last rows by the model's own code: [_COMPARED, V] each."""
    module = model.module
    AttentionInterface.register(_ROUNDED, _rounded_attention)
    AttentionMaskInterface.register(_ROUNDED, eager_mask)
    module.set_attn_implementation(attention)
    last = range(len(tokens) - _COMPARED, len(tokens))
    rows = [*range(_EARLY, _EARLY + _COMPARED), *last]
    try:
        logits: torch.Tensor = module(
            input_ids=torch.tensor([tokens], device=module.device),
            use_cache=False,
            logits_to_keep=torch.tensor(rows, device=module.device),
        ).logits
    finally:
        module.set_attn_implementation(NAME)
    compared = logits[0].float()
    return compared[:_COMPARED], compared[_COMPARED:]


def _rounded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in float32, each number of its output off by up to one step of its type."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.float().repeat_interleave(groups, 1) for x in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query.float() @ keys.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask
    output = scores.softmax(-1) @ values
    layer: Any = module.layer_idx
    generator = torch.Generator().manual_seed(layer)
    steps = 2 * torch.rand(output.shape, generator=generator).to(output.device) - 1
    output = output * (1 + torch.finfo(query.dtype).eps * steps)
    return output.to(query.dtype).transpose(1, 2).contiguous(), None


def _paged_forward(paged: PagedModel, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same logits through pages."""
    table, other = BlockTable(), BlockTable()
    split = len(tokens) - _COMPARED
    # Blocks of the two sequences lie between each other.
    paged.pool.grow(table, 1)
    paged.pool.grow(other, len(tokens) + 1)
    paged.pool.grow(table, len(tokens) + 1)

    def verification(begin: int) -> torch.Tensor:
        """Of a draft that is accepted whole, after one that was rejected."""
        table.kv_len = begin
        paged.forward([Segment([tokens[begin], *(tokens[0],) * _COMPARED], table, 0)])
        neighbour = Segment(tokens[:1], other, 1)
        rows = tokens[begin : begin + _COMPARED]
        return paged.forward([neighbour, Segment(rows, table, _COMPARED)])[1:]

    try:
        paged.forward([Segment(tokens[::-1], other, 0), Segment(tokens[:_EARLY], table, 0)])
        other.kv_len = len(tokens)
        early = verification(_EARLY)
        table.kv_len = _EARLY + _COMPARED
        paged.forward([Segment(tokens[table.kv_len : split], table, 0)])
        return early, verification(split)
    finally:
        paged.pool.release(table)
        paged.pool.release(other)
