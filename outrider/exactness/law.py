"""The target's own law of the first tokens after a prompt, computed from its logits.

law[(x1, …, xn)] = p(x1 | prompt) · p(x2 | prompt, x1) · … · p(xn | prompt, x1 … x(n-1))
"""

from collections.abc import Callable, Sequence

import torch

from outrider.exactness.reference import Reference

Law = dict[tuple[int, ...], float]
# float64 [N, V] logits after N contexts to float64 [N, V] probabilities
Process = Callable[[torch.Tensor], torch.Tensor]


def tempered(temperature: float, top_k: int = 0) -> Process:
    """Sampling at a temperature, of the `top_k` best tokens (0: of all)."""

    def process(logits: torch.Tensor) -> torch.Tensor:
        scores = logits / temperature
        if 0 < top_k < scores.shape[1]:
            kth = scores.topk(top_k).values[:, -1:]
            scores = scores.masked_fill(scores < kth, -torch.inf)
        return scores.softmax(-1)

    return process


def law_of(
    reference: Reference,
    prompt: Sequence[int],
    tokens: int,
    process: Process,
    *,
    least: float = 0.0,
    stop_ids: frozenset[int] = frozenset(),
) -> Law:
    """The probability of each sequence of the first `tokens` tokens.

    Sequences less likely than `least` are left out, with all that they begin. A stop id ends
    a sequence early.
    """
    law: Law = {}
    open_: Law = {(): 1.0}
    for _ in range(tokens):
        if not open_:
            break
        begun = list(open_)
        rows = process(reference.logits([[*prompt, *sequence] for sequence in begun]))
        following: Law = {}
        for sequence, row in zip(begun, rows, strict=True):
            joint = row * open_[sequence]
            for token in (joint >= least).nonzero().flatten().tolist():
                ended = token in stop_ids
                (law if ended else following)[(*sequence, token)] = float(joint[token])
        open_ = following
    return law | open_
