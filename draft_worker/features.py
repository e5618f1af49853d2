"""The hidden states that come with a commit, as far as the drafter can use them. No torch."""

from outrider.drafting.base import HiddenStates
from outrider.messages import CommitDraft, Tensor

# An unsigned type of the same size, and the bits that are all set in what is not finite.
_EXPONENTS = {
    "float32": ("<u4", 0x7F800000),
    "bfloat16": ("<u2", 0x7F80),
    "float16": ("<u2", 0x7C00),
}


def hidden_of(commit: CommitDraft, reads: HiddenStates | None) -> Tensor | None:
    """The states [tokens, size] that the drafter reads; None where they did not come.

    What has another shape or numbers that are not finite counts as not having come.
    """
    if reads is None or not commit.token_ids:
        return None
    shape = (len(commit.token_ids), reads.size)
    for layer, tensor in commit.features:
        if layer == reads.layer:
            return tensor if tensor.shape == shape and _is_finite(tensor) else None
    return None


def _is_finite(tensor: Tensor) -> bool:
    # Not at the top: drafters that read no states have no use for it.
    import numpy as np

    kind, exponent = _EXPONENTS[tensor.dtype]
    bits = np.frombuffer(tensor.data, kind)
    return bool(((bits & exponent) != exponent).all())
