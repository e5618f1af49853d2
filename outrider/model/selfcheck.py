"""At start: does the paged forward agree with the model's own? A model that has something
that paging does not know (a recurrent state, its own mask, unusual positions) fails here.

How far rounding alone takes the two apart depends on the type and the model: in bfloat16 it is
1% of the logits on a model of two layers and 4% on one of thirty. So it is measured: the model's
own forward is run again with attention in float32 and one more rounding at the end of each
layer's attention. Right models came out at 0 to 1.6 times that, in all three types; what faults
come to is in docs/exactness.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from outrider.errors import UnsupportedModelError
from outrider.model.attention import NAME
from outrider.model.blocks import BLOCK_TOKENS, BlockPool, BlockTable
from outrider.model.linears.install import require_weights
from outrider.model.loading import LoadedModel
from outrider.model.paged import Segment

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
Whole = Callable[[torch.Tensor], torch.Tensor]


class Paged(Protocol):
    """What is checked: a `PagedModel`, or one that is split over ranks."""

    @property
    def pool(self) -> BlockPool:
        """The blocks of its pages."""
        ...

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Run every row once; see `PagedModel.forward`."""
        ...


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far the paged forward is from the model's own, and how far rounding alone is."""

    difference: float
    rounding: float

    @property
    def ratio(self) -> float:
        """The difference in units of what rounding does."""
        return self.difference / self.rounding


@dataclass(frozen=True, slots=True)
class OwnLogits:
    """Logits of a model by its own code on fixed `tokens`: [rows, V] in each place.

    Taken before the weights are laid out anew, after which the model can't run its own code.
    `rounded` are those with more rounding.
    """

    name: str
    model_type: str
    dtype: torch.dtype
    tokens: list[int]
    expected: tuple[torch.Tensor, ...]
    rounded: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, model: LoadedModel, whole: Whole | None = None) -> Self | None:
        """Run the model's own code; None where its context is too small to tell anything.

        Of a model that is split over ranks `whole` puts rows of logits together, on rank 0; on
        the others, which have to call this too, the result is of no use.

        Raises:
            InternalError: the weights were laid out anew before.
        """
        require_weights(model.module)
        length = _probe_length(model)
        if length < _MIN_TOKENS:
            return None
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, model.vocab_size, (length,), generator=generator).tolist()
        return cls(
            model.name,
            model.module.config.model_type,
            model.module.dtype,
            tokens,
            _own_forward(model, tokens, "eager", whole or _same),
            _own_forward(model, tokens, _ROUNDED, whole or _same),
        )


def check_paged_forward(
    own: OwnLogits | None, paged: Paged, limit: float | None = None
) -> Comparison | None:
    """Compare the two; None where the context or the pool is too small for it.

    `limit` bounds the relative difference where rounding does not, as with weights that are
    kept in fewer bits.

    Raises:
        UnsupportedModelError: they differ by more than rounding, or than `limit`.
    """
    if own is None or paged.pool.free < 2 * -(-(len(own.tokens) + 1) // BLOCK_TOKENS):
        return None
    found = compare(own, paged)
    most = min(LIMITS[own.dtype] * found.rounding, _MAX_DIFFERENCE) if limit is None else limit
    if not found.difference <= most:
        raise UnsupportedModelError(
            f"{own.name} can't be served exactly: between its own forward and the paged one its "
            f"logits differ by {found.difference:.2g}, where rounding makes {found.rounding:.2g}. "
            f"Its attention ({own.model_type}) has something that paging lacks"
        )
    return found


def compare(own: OwnLogits, paged: Paged) -> Comparison:
    """Compare the two on fixed tokens, at the place where they are furthest apart.

    The tokens go in as prefill chunks, rejected drafts and verifications, beside another
    sequence. The difference of rows is that of their centred logits, relative (L2).
    """
    least = torch.finfo(own.dtype).eps / 4  # where attention hardly matters
    places = [
        Comparison(_difference(actual, expected), max(_difference(near, expected), least))
        for expected, near, actual in zip(
            own.expected, own.rounded, _paged_forward(paged, own.tokens), strict=True
        )
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
    model: LoadedModel, tokens: list[int], attention: str, whole: Whole
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
    compared = whole(logits[0]).float()
    return compared[:_COMPARED], compared[_COMPARED:]


def _same(logits: torch.Tensor) -> torch.Tensor:
    return logits


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


def _paged_forward(paged: Paged, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
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
