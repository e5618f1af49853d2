"""The attention implementation that is registered with transformers.

A step is one flat row of N tokens, `[1, N]`, that belong to several sequences. The model
runs unchanged; in each layer its attention finds the step in the keyword arguments and
hands it queries, keys and values.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from outrider.errors import UnsupportedModelError

NAME = "outrider_paged"
STEP_ARGUMENT = "outrider_step"
# Keyword arguments that models pass along and that do not change what attention computes
# here: positions are in the rotary embedding already, the rest is about caches and outputs.
_HARMLESS = {
    "cache",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


class Step(Protocol):
    """What the registered function hands each layer's attention to."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: "How"
    ) -> torch.Tensor:
        """Attention of q [H, N, D] over k, v [Hkv, N, D] and what came before: [N, H, Dv]."""
        ...


@dataclass(frozen=True, slots=True)
class How:
    """The variant of attention that a layer asks for."""

    scaling: float
    window: int | None
    softcap: float | None


@dataclass(slots=True)
class KvShapes:
    """A step that only records what each layer's keys and values look like."""

    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How
    ) -> torch.Tensor:
        """Record (Hkv, D, Dv) and give zeros of the right shape."""
        self.shapes[layer] = (k.shape[0], k.shape[2], v.shape[2])
        return q.new_zeros(q.shape[1], q.shape[0], v.shape[2])


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: q [1, H, N, D] to ([1, N, H, Dv], None)."""
    step: Step | None = others.pop(STEP_ARGUMENT, None)
    if step is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not hand keyword arguments to its attention"
        )
    if attention_mask is not None or dropout:
        raise UnsupportedModelError(f"{type(module).__name__} needs a mask or dropout of its own")
    unknown = {name for name, value in others.items() if value is not None} - _HARMLESS
    if unknown:
        raise UnsupportedModelError(
            f"attention of {type(module).__name__} has a variant that is not supported here: "
            f"{', '.join(sorted(unknown))}"
        )
    how = How(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    layer: Any = module.layer_idx
    return step.attend(layer, query[0], key[0], value[0], how)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """Masks are the step's own business."""


def register() -> None:
    """Make the implementation known to transformers; more than once does no harm."""
    AttentionInterface.register(NAME, _attention_function)
    AttentionMaskInterface.register(NAME, _no_mask)
