"""The rejection rule: accept x ~ q with probability min(1, p(x) / q(x)).

    accepted with probability  min(1, p(x) / q(x))
    else drawn from            norm(max(p - q, 0))

What comes out is distributed as p exactly (Leviathan, Kalman, Matias, "Fast Inference from
Transformers via Speculative Decoding", arXiv 2211.17192, appendix A.1), provided that x was
sampled from the q that is reported. p is the target's processed distribution, q the draft's.
A drafter that proposes one certain token has a one-hot q.

Chance is an argument, so that production draws it from keyed noise and a proof sums over it.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from outrider.messages import SparseDistribution
from outrider.sampling.acceptance import Verdict, verdict
from outrider.sampling.noise import Stream, gumbels, uniform


class Chance(Protocol):
    """Where the randomness of a round comes from."""

    def accept(self, position: int, probability: float) -> bool:
        """True with the given probability."""
        ...

    def draw(self, position: int, stream: Stream, p: torch.Tensor) -> int:
        """A token from the distribution p, float64 [V]."""
        ...


class KeyedChance:
    """The keyed noise of a session: the same answers for the same position, always."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def accept(self, position: int, probability: float) -> bool:
        """True with the given probability."""
        return uniform(self._seed, position, Stream.ACCEPT) < probability

    def draw(self, position: int, stream: Stream, p: torch.Tensor) -> int:
        """A token from the distribution p, by the Gumbel-max trick."""
        noise = gumbels([self._seed], [position], p.shape[0], stream=stream, device=p.device)
        return int((p.log() + noise[0]).argmax())


def verify_rejection(
    draft: Sequence[int],
    q: Sequence[torch.Tensor],
    p: torch.Tensor,
    position: int,
    chance: Chance,
) -> Verdict:
    """The verdict on a chain of k draft tokens.

    Args:
        draft: k tokens, each sampled from its q.
        q: k distributions, float64 [V] each; q[i] gives draft[i].
        p: the target's processed distributions, float64 [k + 1, V].
        position: the index in the sequence of draft[0].
    """
    for i, token in enumerate(draft):
        if not chance.accept(position + i, acceptance_probability(p[i], q[i], token)):
            replaced = chance.draw(position + i, Stream.RESAMPLE, residual(p[i], q[i]))
            return verdict(draft[:i], replaced, len(draft), whole=False)
    last = chance.draw(position + len(draft), Stream.TARGET, p[len(draft)])
    return verdict(draft, last, len(draft), whole=True)


def acceptance_probability(p: torch.Tensor, q: torch.Tensor, token: int) -> float:
    """min(1, p(token) / q(token)), without division by a small q.

    0 for a token that q can't give, so that no drafter brings in what p bars.
    """
    p_token, q_token = float(p[token]), float(q[token])
    if q_token == 0:
        return 0.0
    return 1.0 if p_token >= q_token else p_token / q_token


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """norm(max(p - q, 0)), float64 [V]; p itself where nothing is left, as when p = q."""
    rest = (p - q).clamp_min(0.0)
    total = rest.sum()
    return rest / total if total > 0 else p


def one_hot(token: int, vocab_size: int) -> torch.Tensor:
    """The q of a certain proposal, float64 [vocab_size]."""
    q = torch.zeros(vocab_size, dtype=torch.float64)
    q[token] = 1.0
    return q


def dense(q: SparseDistribution, vocab_size: int) -> torch.Tensor:
    """The q that a drafter reported, float64 [vocab_size]."""
    weights = torch.tensor(q.weights, dtype=torch.float64)
    result = torch.zeros(vocab_size, dtype=torch.float64)
    result[torch.tensor(q.token_ids)] = weights / weights.sum()
    return result
