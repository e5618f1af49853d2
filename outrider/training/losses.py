"""How far a draft network is from the target.

p is the target's distribution over the ids of the draft's head, q the network's. Under greedy or
coupled acceptance the likelier the target's token is in q, the better: forward KL. What rejection
sampling accepts is 1 - TV(p, q) (Leviathan et al., arXiv 2211.17192, theorem 3.5), so the total
variation can be a part of the loss.

q is taken over a *shortlist* of the head: what anybody in the batch may say, and some ids more
by chance. It changes from batch to batch, so that nothing stays out of sight.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from outrider.training.network import DraftNetwork, Texts
from outrider.training.teacher import Answers

# A step that is one further ahead weighs so much less.
_STEP_DECAY = 0.8
# Ids of a shortlist that nobody asked for.
_BY_CHANCE = 512


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
    """A loss to be made smaller, and what there is to see of it: of the first step, per token."""

    total: torch.Tensor
    divergence: float
    agreement: float
    tokens: int


def loss_of(
    network: DraftNetwork,
    texts: Texts,
    answers: Answers,
    *,
    steps: int,
    weights: Weights,
    norm_weight: torch.Tensor,
    chance: torch.Generator,
) -> Loss:
    """The loss over a batch, over the places where the draft has an id for what was said.

    `norm_weight` [target_hidden] is that of the target's last norm.
    """
    states = functional.pad(texts.hidden[:, 1:], (0, 0, 0, 1))
    others = torch.randint(len(network.head), (_BY_CHANCE,), generator=chance)
    known = answers.said >= 0
    asked = torch.cat([answers.ids[known].flatten(), answers.said[known], others])
    shortlist, places = torch.unique(asked, return_inverse=True)
    count = int(known.sum())
    top = answers.ids.shape[-1]
    ids = torch.zeros_like(answers.ids)
    ids[known] = places[: count * top].view(count, top)
    said = torch.zeros_like(answers.said)
    said[known] = places[count * top : count * (top + 1)]
    head = network.head[shortlist]

    total = torch.zeros(())
    divergence = agreement = 0.0
    for step, drafted in enumerate(network.unroll(texts, steps)):
        counted = known.clone()
        counted[:, :step] = False
        rows = drafted[counted]
        logits = rows @ head.T
        p = answers.p[counted]
        log_q = logits.gather(-1, ids[counted]) - logits.logsumexp(-1, keepdim=True)
        loss = _distance(p, log_q, weights.tv)
        if step == 0:
            divergence = float(loss.detach())
            agreement = float((logits.detach().argmax(-1) == said[counted]).float().mean())
        if weights.states and network.shape.reads_hidden:
            own = states[counted] / norm_weight
            loss = loss + weights.states * functional.smooth_l1_loss(rows / norm_weight, own)
        total = total + _STEP_DECAY**step * loss
    return Loss(total, divergence, agreement, int(texts.answer.sum()))


def _distance(p: torch.Tensor, log_q: torch.Tensor, tv: float) -> torch.Tensor:
    """Of the likeliest tokens p [N, K], which need not add up to 1, from q."""
    loss = (p * (p.clamp_min(1e-9).log() - log_q)).sum(-1).mean()
    if tv:
        # TV(p, q) is the sum of what p has more than q.
        loss = (1 - tv) * loss + tv * (p - log_q.exp()).clamp_min(0).sum(-1).mean()
    return loss
