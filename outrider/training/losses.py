"""How far a draft network is from the target.

p is the target's distribution over the ids of the draft's head, q the network's. Under greedy or
coupled acceptance the likelier the target's token is in q, the better: forward KL. What rejection
sampling accepts is 1 - TV(p, q) (Leviathan et al., arXiv 2211.17192, theorem 3.5), so the total
variation can be a part of the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from outrider.training.network import DraftNetwork, Texts

# Of p the likeliest tokens enter the loss; the rest is of no weight.
_TEACHER_TOP = 16
# A step that is one further ahead weighs so much less.
_STEP_DECAY = 0.8


@dataclass(frozen=True, slots=True)
class Weights:
    """`tv`: the share of the total variation, the rest is KL. `states`: of the distance of states.

    Drafting ahead, the network reads its own states where those of the target were, so it helps
    that they are alike (Li et al., "EAGLE", arXiv 2401.15077).
    """

    tv: float = 0.0
    states: float = 0.1


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss to be made smaller, and what there is to see of it."""

    total: torch.Tensor
    divergence: float
    agreement: float
    tokens: int


def loss_of(
    network: DraftNetwork,
    texts: Texts,
    draft_ids: torch.Tensor,
    *,
    steps: int,
    weights: Weights,
    norm_weight: torch.Tensor,
) -> Loss:
    """The loss over a batch.

    `draft_ids` [V] are the draft's ids of the target's, -1 where it has none; such tokens are
    left out. `norm_weight` [target_hidden] is that of the target's last norm.
    """
    following = functional.pad(draft_ids[texts.answer_ids[:, 1:]], (0, 1), value=-1)
    known = functional.pad(texts.answer[:, 1:], (0, 1)) & (following >= 0)
    states = functional.pad(texts.hidden[:, 1:], (0, 0, 0, 1))
    total = torch.zeros(())
    divergence = agreement = 0.0
    for step, drafted in enumerate(network.unroll(texts, steps)):
        counted = known.clone()
        counted[:, :step] = False
        loss, agreed = _step_loss(
            network.head, drafted[counted], states[counted], following[counted], weights.tv
        )
        if step == 0:
            divergence, agreement = float(loss.detach()), agreed
        if weights.states and network.shape.reads_hidden:
            scale = norm_weight
            apart = functional.smooth_l1_loss(drafted[counted] / scale, states[counted] / scale)
            loss = loss + weights.states * apart
        total = total + _STEP_DECAY**step * loss
    return Loss(total, divergence, agreement, int(texts.answer.sum()))


def _step_loss(
    head: torch.Tensor,
    drafted: torch.Tensor,
    states: torch.Tensor,
    following: torch.Tensor,
    tv: float,
) -> tuple[torch.Tensor, float]:
    with torch.no_grad():
        p = (states @ head.T).softmax(-1)
        top, ids = p.topk(min(_TEACHER_TOP, p.shape[1]), -1)
    logits = drafted @ head.T
    log_q = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
    loss = (top * (top.clamp_min(1e-9).log() - log_q)).sum(-1).mean()
    if tv:
        # Mass outside of p's top counts as missing from q's; what is left out is the same for all.
        distance = (top - log_q.exp()).clamp_min(0).sum(-1).mean()
        loss = (1 - tv) * loss + tv * distance
    agreed = (logits.detach().argmax(-1) == following).float().mean()
    return loss, float(agreed)


def positions_of(ids: Sequence[int], vocab_size: int) -> torch.Tensor:
    """The draft's id of each of the target's, -1 where it has none: int64 [V]."""
    found = torch.full((vocab_size,), -1)
    found[torch.tensor(ids)] = torch.arange(len(ids))
    return found
