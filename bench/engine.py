"""The engine of a verify worker in this thread, without drafts, its steps taken one by one.

The model is loaded and the steps are taken as verify workers do: the same scheduler, the same
runner, and what they say is turned into messages for the wire.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.sides import Completed
from outrider import wire
from outrider.errors import InternalError
from outrider.messages import (
    Draft,
    Endings,
    Progress,
    SamplingParams,
    SessionEnded,
    SessionFailed,
    SpeculationOptions,
    StartSession,
)
from outrider.model.paged import PagedModel, Segment
from outrider.model.parallel.leader import ParallelModel
from outrider.model.rows import StepOutput
from outrider.sampling.scores import Choosing, Scores, WholeScores
from verify_worker.config import Settings as WorkerSettings
from verify_worker.leading import Ranks
from verify_worker.runner import Runner
from verify_worker.state import Decided, Output, Plan, Session, ToCoordinator, Work
from verify_worker.target import load_target
from verify_worker.tracing import SessionSpans

PHASES = ("plan", "reserve", "forward", "sampling", "apply", "messages")


@dataclass(slots=True)
class Step:
    """One step: seconds of each of PHASES, and the tokens that it committed by session."""

    phases: dict[str, float]
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.phases.values())

    @property
    def outside(self) -> float:
        """The share of the step that is not the model's forward."""
        return 1 - self.phases["forward"] / self.seconds


class TimedModel:
    """A model with its pages that adds up the seconds of its forwards."""

    def __init__(self, model: PagedModel | ParallelModel) -> None:
        self.seconds = 0.0
        self._model = model

    def step(self, segments: Sequence[Segment]) -> StepOutput:
        """The model's own step."""
        began = time.perf_counter()
        try:
            return self._model.step(segments)
        finally:
            self.seconds += time.perf_counter() - began

    def score(self, segments: Sequence[Segment], choosing: Choosing) -> Scores:
        """The model's own, over the forward that is timed.

        Of a split model all of it is: rows are brought together in it, or tokens alone.
        """
        if isinstance(self._model, ParallelModel):
            began = time.perf_counter()
            try:
                return self._model.score(segments, choosing)
            finally:
                self.seconds += time.perf_counter() - began
        output = self.step(segments)
        return WholeScores(output.logits, output.hidden, choosing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class VerifyEngine:
    """A target with its scheduler and runner; sessions are greedy and end at their length."""

    name = "Outrider"

    def __init__(
        self, path: str, *, threads: int, ranks: Ranks | None = None, **settings: Any
    ) -> None:
        """Load a checkpoint; `settings` are further ones of a verify worker."""
        # Enough for every benchmark, and no matter how much memory others have left.
        settings = {"kv_memory": "1GiB", **settings}
        whole = WorkerSettings(model=path, redis_url="", threads=threads, **settings)
        self.target = target = load_target(whole, ranks)
        self.model = target.model
        self.scheduler = target.scheduler
        self.context_len = target.context_len
        self._forwards = TimedModel(target.model)
        model: Any = self._forwards
        self._runner = Runner(model, target.token_count)
        self._numbers = itertools.count()
        self._spans = SessionSpans()

    def start(self, prompt: Sequence[int], new_tokens: int) -> str:
        """Begin a session and name it."""
        session_id = f"bench-{next(self._numbers)}"
        command = StartSession(
            session_id=session_id,
            epoch=1,
            token_ids=tuple(prompt),
            prompt_len=len(prompt),
            sampling=SamplingParams(),
            endings=Endings(new_tokens),
            speculation=SpeculationOptions(enabled=False),
        )
        failed = [
            output.event
            for output in self.scheduler.start(self._spans.begin(command), owner=0)
            if isinstance(output, ToCoordinator)
        ]
        if failed:
            raise InternalError(f"a session of the benchmark did not start: {failed[0]}")
        return session_id

    def close(self, session_id: str) -> None:
        """End a session before its end, or after it."""
        self._spans.end(session_id)
        self.scheduler.close(session_id, epoch=1)

    def step(self) -> Step:
        """Take one step of whatever sessions there are."""
        marks = [time.perf_counter()]
        plan = self.scheduler.plan(time.monotonic())
        if plan is None:
            raise InternalError("the benchmark asked for a step, and no session can work")
        marks.append(time.perf_counter())
        self.scheduler.reserve(plan)
        marks.append(time.perf_counter())
        before = self._forwards.seconds
        outcome = self._runner.run(plan)
        forward = self._forwards.seconds - before
        marks.append(time.perf_counter())
        outputs = self.scheduler.apply(plan, outcome, time.monotonic())
        marks.append(time.perf_counter())
        step = Step({})
        self._publish(outputs, step)
        marks.append(time.perf_counter())
        spent = [end - begin for begin, end in itertools.pairwise(marks)]
        step.phases = {
            "plan": spent[0],
            "reserve": spent[1],
            "forward": forward,
            "sampling": spent[2] - forward,
            "apply": spent[3],
            "messages": spent[4],
        }
        return step

    def complete(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Completed:
        """Run prompts together from start to end."""
        began = time.perf_counter()
        said: dict[str, list[int]] = {self.start(ids, new_tokens): [] for ids in prompts}
        running = set(said)
        while running:
            step = self.step()
            for session_id, tokens in step.tokens.items():
                said[session_id] += tokens
            running -= step.ended
        return Completed(time.perf_counter() - began, list(said.values()))

    def decoding(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[str]:
        """Begin sessions and step until each has said its first token."""
        sessions = [self.start(ids, new_tokens) for ids in prompts]
        silent = set(sessions)
        while silent:
            silent -= self.step().tokens.keys()
        return sessions

    def verification(self, session_id: str, draft: Draft) -> Callable[[], float]:
        """The step that verifies a draft of a decoding session, to be timed again and again.

        Nothing comes of it, so that the session stays as it is.
        """
        session: Session = self.scheduler.sessions[session_id]
        plan = Plan((Work(session, 1, draft),))

        def seconds() -> float:
            self.scheduler.reserve(plan)
            began = time.perf_counter()
            outcome = self._runner.run(plan)
            taken = time.perf_counter() - began
            self.scheduler.pool.trim(session.table, session.table.kv_len)
            if not isinstance(outcome.results[0], Decided):
                raise InternalError(f"a verification failed: {outcome.results[0]}")
            return taken

        return seconds

    def _publish(self, outputs: list[Output], step: Step) -> None:
        """What a worker does with the outputs, up to the bytes of the messages."""
        self._spans.observe(outputs)
        for output in outputs:
            if not isinstance(output, ToCoordinator):
                continue
            event = output.event
            wire.decode_event_to_pb(event).SerializeToString()
            match event:
                case Progress():
                    step.tokens[event.session_id] = event.token_ids
                case SessionEnded():
                    step.ended.add(event.session_id)
                case SessionFailed():
                    raise InternalError(f"a session of the benchmark failed: {event.error}")
