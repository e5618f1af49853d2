"""The run of a training: batches, steps, checkpoints, and what was seen on the way."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.errors import ConfigError
from outrider.training.acceptance import Acceptance, acceptance
from outrider.training.batches import endless, stack
from outrider.training.corpus import Example
from outrider.training.losses import Weights, loss_of
from outrider.training.network import DraftNetwork
from outrider.training.teacher import Teacher

CHECKPOINT = "checkpoint.pt"
# Of a step's gradient (L2).
_CLIP = 1.0
_BETAS = (0.9, 0.95)
# The rate at the end of the schedule, as a share of the highest.
_LAST_SHARE = 0.03


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train; `batch_tokens` are answer tokens, padding included."""

    steps: int
    seed: int = 0
    rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.1
    batch_tokens: int = 2000
    most_prompt: int = 192
    # Steps of an unrolled pass, and from which share of the run on: one is enough before.
    unroll: int = 2
    unroll_from: float = 0.6
    weights: Weights = field(default_factory=Weights)
    look_every: int = 200
    draft_len: int = 4

    def rate_at(self, step: int) -> float:
        """The learning rate: up in a line, down in a half cosine."""
        done = step / max(self.steps, 1)
        decay = _LAST_SHARE + (1 - _LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * done))
        return self.rate * min(1.0, (step + 1) / max(self.warmup, 1)) * decay

    def unroll_at(self, step: int) -> int:
        """How many steps a pass is unrolled."""
        return self.unroll if step >= self.unroll_from * self.steps else 1


@dataclass(slots=True)
class History:
    """What was seen: the loss and agreement of every step, and acceptance now and then."""

    losses: list[float] = field(default_factory=list)
    agreements: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    # (step, mean acceptance length, acceptance by position)
    looks: list[tuple[int, float, tuple[float, ...]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Glance:
    """How far a run is."""

    step: int
    steps: int
    loss: float
    mean_length: float
    seconds_left: float


class Run:
    """A training that can be ended at any time and goes on from its last checkpoint."""

    def __init__(
        self,
        network: DraftNetwork,
        plan: Plan,
        directory: Path,
        *,
        draft_ids: torch.Tensor,
        norm_weight: torch.Tensor,
    ) -> None:
        """Shapes of `draft_ids`: see `Teacher`; of `norm_weight`: see `loss_of`."""
        self.history = History()
        self._network = network
        self._plan = plan
        self._directory = directory
        self._draft_ids = draft_ids
        self._norm_weight = norm_weight
        self._optimizer = torch.optim.AdamW(
            network.parameters(), lr=plan.rate, betas=_BETAS, weight_decay=plan.weight_decay
        )
        self._step = 0

    def resume(self) -> bool:
        """Go on from the checkpoint, if there is one.

        Raises:
            ConfigError: it is of another plan.
        """
        path = self._directory / CHECKPOINT
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        if state["plan"] != self._signature():
            raise ConfigError(
                f"{path} is of a training with other settings; name another directory with "
                "--out, or delete it to begin again"
            )
        self._network.load_state_dict(state["network"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._step = state["step"]
        self.history = History(**json.loads(state["history"]))
        self.history.looks = [
            (step, mean, tuple(shares)) for step, mean, shares in self.history.looks
        ]
        return True

    def train(
        self,
        examples: Sequence[Example],
        held_out: Sequence[Example],
        show: Callable[[Glance], None] = lambda _: None,
    ) -> Acceptance:
        """Train to the end of the plan; what is accepted then on the texts held out.

        Raises:
            ConfigError: there is nothing to train or to test on.
        """
        if not examples or not held_out:
            raise ConfigError("there are too few texts to train on; ask for more with --examples")
        plan, began = self._plan, time.monotonic()
        first = self._step
        if not self.history.looks:
            self._look(held_out)
        teacher = Teacher(examples, self._network.head, self._draft_ids)
        batches = endless(examples, tokens=plan.batch_tokens, seed=plan.seed, skip=self._step)
        while self._step < plan.steps:
            self._advance(next(batches), teacher)
            if self._step % plan.look_every == 0 or self._step == plan.steps:
                self._look(held_out)
                self._keep()
            left = (time.monotonic() - began) / (self._step - first) * (plan.steps - self._step)
            recent = self.history.losses[-50:]
            show(
                Glance(
                    self._step,
                    plan.steps,
                    sum(recent) / len(recent),
                    self.history.looks[-1][1],
                    left,
                )
            )
        self._network.eval()
        return acceptance(self._network, held_out, self._draft_ids, plan.draft_len)

    def _advance(self, batch: Sequence[Example], teacher: Teacher) -> None:
        plan = self._plan
        for group in self._optimizer.param_groups:
            group["lr"] = plan.rate_at(self._step)
        reads = self._network.shape.reads_hidden
        # What is left out by chance is the same in a run that was ended and goes on.
        torch.manual_seed((plan.seed << 20) + self._step)
        self._network.train()
        loss = loss_of(
            self._network,
            stack(batch, plan.most_prompt),
            teacher.of(batch),
            steps=plan.unroll_at(self._step) if reads else 1,
            weights=plan.weights,
            norm_weight=self._norm_weight,
            chance=torch.Generator().manual_seed(plan.seed + self._step),
        )
        self._optimizer.zero_grad()
        loss.total.backward()  # type: ignore[no-untyped-call]  # torch has no hint for it
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), _CLIP)
        self._optimizer.step()
        self._step += 1
        history = self.history
        history.losses.append(loss.divergence)
        history.agreements.append(loss.agreement)
        history.tokens.append((history.tokens[-1] if history.tokens else 0) + loss.tokens)

    def _look(self, held_out: Sequence[Example]) -> None:
        self._network.eval()
        found = acceptance(self._network, held_out, self._draft_ids, self._plan.draft_len)
        self.history.looks.append((self._step, found.mean_length, found.by_position))

    def _signature(self) -> str:
        described: dict[str, Any] = {
            "plan": asdict(self._plan),
            "shape": asdict(self._network.shape),
            "ids": len(self._network.head),
        }
        return json.dumps(described, sort_keys=True)

    def _keep(self) -> None:
        path = self._directory / CHECKPOINT
        aside = path.with_suffix(".new")
        torch.save(
            {
                "plan": self._signature(),
                "network": self._network.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "step": self._step,
                "history": json.dumps(asdict(self.history)),
            },
            aside,
        )
        aside.replace(path)
