"""A scheduler and a runner with a real tiny model, stepped by hand, with a clock of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.messages import (
    Draft,
    DraftWorkerRef,
    Endings,
    Progress,
    Proposal,
    SamplingParams,
    SessionEnded,
    SessionFailed,
    StartSession,
    TokenLogprobs,
)
from outrider.model.loading import LoadedModel
from outrider.model.paged import Numerics, PagedModel
from outrider.model.parallel.leader import ParallelModel
from outrider.sampling.noise import gumbels
from tests.support.models import EOS, TOKENS
from verify_worker.runner import Runner
from verify_worker.scheduler import Limits, Scheduler
from verify_worker.state import Output, Plan, Session, ToCoordinator

DRAFTER = DraftWorkerRef("d", "127.0.0.1:1")
# Every step takes as long, so that what happens does not depend on the machine.
STEP_S = 0.01


@dataclass(slots=True)
class Said:
    """What one session said."""

    progress: list[Progress] = field(default_factory=list)
    ended: SessionEnded | SessionFailed | None = None

    @property
    def tokens(self) -> list[int]:
        """Its tokens after the prompt."""
        return [token for event in self.progress for token in event.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """One entry a token, where they were asked for."""
        return [entry for event in self.progress for entry in event.logprobs]


class Stepper:
    """Messages in, one step at a time, and what came out by session."""

    def __init__(
        self,
        model: LoadedModel | ParallelModel,
        blocks: int = 60,
        *,
        prefix_cache: bool = True,
        numerics: Numerics | None = None,
        **limits: Any,
    ) -> None:
        """`blocks` is for a model that has no pages yet."""
        self.now = 0.0
        self.paged: Any = (
            PagedModel(model, blocks, numerics) if isinstance(model, LoadedModel) else model
        )
        values = {"context_len": model.context_len, "vocab_size": TOKENS, **limits}
        self.scheduler = Scheduler(
            self.paged.pool, Limits(**values), kv_fingerprint="kv" if prefix_cache else ""
        )
        self.runner = Runner(self.paged, TOKENS)
        self.said: dict[str, Said] = {}
        self.plans: list[Plan] = []

    def start(
        self, sid: str, prompt: Sequence[int], new: int, sampling: SamplingParams, **fields: Any
    ) -> None:
        """Begin a session; `said` has the tokens that it said before."""
        said = fields.pop("said", ())
        owner = fields.pop("owner", 1)
        command = StartSession(
            **{
                "session_id": sid,
                "epoch": 1,
                "token_ids": (*prompt, *said),
                "prompt_len": len(prompt),
                "sampling": sampling,
                "endings": Endings(new, frozenset({EOS})),
                "drafter": DRAFTER,
                **fields,
            }
        )
        self.take(self.scheduler.start(command, owner))

    @property
    def wanting(self) -> list[Session]:
        """Sessions that wait for a draft."""
        return [s for s in self.scheduler.sessions.values() if s.want is not None]

    def propose(self, session: Session, draft: Draft) -> None:
        """Answer what the session wants."""
        assert session.want is not None
        proposal = Proposal(
            session_id=session.session_id,
            epoch=session.epoch,
            base_len=session.want.base_len,
            draft=draft,
        )
        self.take(self.scheduler.drafts.receive(DRAFTER.worker_id, proposal, self.now))

    def step(self) -> bool:
        """One step, after waiting for as long as the scheduler would; False: nothing to do."""
        for _ in range(100):
            plan = self.scheduler.plan(self.now)
            if plan is not None:
                break
            wake = self.scheduler.wake_at_s(self.now)
            if wake is None:
                return False
            self.now = max(self.now, wake) + 1e-6
        else:
            raise AssertionError("it waits for ever")
        self.plans.append(plan)
        self.scheduler.reserve(plan)
        outcome = replace(self.runner.run(plan), compute_s=STEP_S)
        self.now += STEP_S
        self.take(self.scheduler.apply(plan, outcome, self.now))
        return True

    def take(self, outputs: Sequence[Output]) -> None:
        """Note what came out."""
        for output in outputs:
            event = output.event if isinstance(output, ToCoordinator) else None
            match event:
                case Progress():
                    self.said.setdefault(event.session_id, Said()).progress.append(event)
                case SessionEnded() | SessionFailed():
                    self.said.setdefault(event.session_id, Said()).ended = event


class Reference:
    """Plain decoding: transformers alone, on the whole sequence, without any cache."""

    def __init__(self, path: Any) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path).eval()
        self._known: dict[tuple[tuple[int, ...], SamplingParams], tuple[int, float]] = {}

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Float32 [TOKENS] after the tokens."""
        row: torch.Tensor = self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
        return row[:TOKENS].float()

    def next(self, tokens: Sequence[int], sampling: SamplingParams) -> tuple[int, float]:
        """The token after these, and by how much it is better than the second best."""
        key = tuple(tokens), sampling
        if key not in self._known:
            best = self._scores(key[0], sampling).topk(2)
            margin = float(best.values[0] - best.values[1])
            self._known[key] = int(best.indices[0]), margin
        return self._known[key]

    def continuation(
        self, tokens: Sequence[int], count: int, sampling: SamplingParams
    ) -> list[int]:
        """The `count` tokens after these."""
        text = list(tokens)
        for _ in range(count):
            text.append(self.next(text, sampling)[0])
        return text[len(tokens) :]

    def _scores(self, tokens: tuple[int, ...], sampling: SamplingParams) -> torch.Tensor:
        scores = self.logits(tokens).double()[None]
        ids = torch.tensor([tokens])
        if sampling.repetition_penalty != 1.0:
            scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
        if sampling.temperature:
            scores = scores / sampling.temperature
            if sampling.top_k:
                scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
            if sampling.top_p < 1:
                scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
            scores = scores + gumbels([sampling.seed], [len(tokens)], TOKENS)
        return scores[0]
