"""What is wrong with the features of a commit, if anything: they come from a peer. Pure."""

from dataclasses import dataclass

import numpy as np

from outrider.messages import CommitDraft, Tensor

# How numpy reads the bits of a tensor, and which of them are all set in NaN and infinity.
_EXPONENTS: dict[str, tuple[str, int]] = {
    "float32": ("<u4", 0x7F800000),
    "bfloat16": ("<u2", 0x7F80),
    "float16": ("<u2", 0x7C00),
}


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """What a drafter reads: the layers, all of them each time, and numbers of a hidden state."""

    layers: frozenset[int]
    hidden: int


def fault_of(command: CommitDraft, shape: FeatureShape | None = None) -> str:
    """What is wrong with the features of a commit; empty when nothing is, or there are none.

    Without a `shape` they may be of any layers and of any width, the same for all.
    """
    features = command.features
    if features is None:
        return "they can't be read"
    layers = [layer for layer, _ in features]
    if len(set(layers)) < len(layers):
        return "a layer comes twice"
    if shape is not None and layers and set(layers) != shape.layers:
        return f"layers {sorted(layers)} where {sorted(shape.layers)} are read"
    any_width = next((tensor.shape[-1] for _, tensor in features if tensor.shape), 0)
    width = any_width if shape is None else shape.hidden
    rows = len(command.token_ids)
    for layer, tensor in features:
        if not width or tensor.shape != (rows, width):
            return f"layer {layer} has the shape {list(tensor.shape)} of {rows} tokens"
        if not _is_finite(tensor):
            return f"layer {layer} has numbers that are not finite"
    return ""


def _is_finite(tensor: Tensor) -> bool:
    bits, exponent = _EXPONENTS[tensor.dtype]
    return not ((np.frombuffer(tensor.data, bits) & exponent) == exponent).any()
