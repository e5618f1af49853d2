"""A verify worker and a draft worker in this thread, joined by the wire format alone.

The schedulers, the runner and the drafter are those of the services. What they say to each
other is turned into protobuf messages, counted, and read back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_worker.figures import Figures
from draft_worker.scheduler import Scheduler as DraftScheduler
from outrider import wire
from outrider.drafting.base import Drafter
from outrider.figures import SpeculationFigures
from outrider.messages import (
    DraftCommand,
    DraftEvent,
    DraftFailed,
    DraftWorkerRef,
    Progress,
    Proposal,
    SessionEnded,
    SessionFailed,
    StartSession,
    TokenLogprobs,
)
from outrider.model.paged import PagedModel
from verify_worker.runner import Runner
from verify_worker.scheduler import Limits, Scheduler
from verify_worker.state import Output, ToCoordinator, ToDrafter

DRAFTER = DraftWorkerRef("draft", "127.0.0.1:1", trusted=True)
# Sessions wait for their drafts, however long those take.
FOREVER_S = 1e9


@dataclass(slots=True)
class Traffic:
    """Messages and bytes of protobuf each way, without what gRPC adds."""

    commands: int = 0
    command_bytes: int = 0
    proposals: int = 0
    proposal_bytes: int = 0
    proposed_tokens: int = 0


@dataclass(slots=True)
class Answer:
    """What one session said."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    figures: SpeculationFigures = field(default_factory=SpeculationFigures)
    ended: SessionEnded | SessionFailed | None = None


class InProcess:
    """Both workers around a target and a drafter; `traffic` counts between them."""

    def __init__(self, target: PagedModel, drafter: Drafter, token_count: int, limits: Limits):
        self.scheduler = Scheduler(target.pool, limits)
        self.runner = Runner(target, token_count)
        self.traffic = Traffic()
        self._drafts = DraftScheduler(drafter, Figures(), max_sessions=limits.max_sessions)
        self._answers: dict[str, Answer] = {}

    def run(self, starts: Sequence[StartSession]) -> list[Answer]:
        """Run sessions to their end, together."""
        answers = self.begin(starts)
        while self.scheduler.sessions:
            self.step()
        return answers

    def begin(self, starts: Sequence[StartSession]) -> list[Answer]:
        """Start sessions; their answers grow with each step."""
        answers = [Answer() for _ in starts]
        for start, answer in zip(starts, answers, strict=True):
            self._answers[start.session_id] = answer
            self._take(self.scheduler.start(start, owner=0))
        return answers

    def step(self) -> None:
        """Let the drafter answer all that is wanted, then take one step of the target."""
        while self._drafts.has_wants:
            self._receive([event for _, event in self._drafts.answer()])
        plan = self.scheduler.plan(0.0)
        assert plan is not None, "nothing to do, and nothing to wait for"
        self.scheduler.reserve(plan)
        self._take(self.scheduler.apply(plan, self.runner.run(plan), 0.0))

    def _take(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if isinstance(output, ToDrafter):
                self._command(output.command)
            if not isinstance(output, ToCoordinator):
                continue
            event = output.event
            answer = self._answers[event.session_id]
            match event:
                case Progress():
                    answer.token_ids += event.token_ids
                    answer.logprobs += event.logprobs
                    accepted = sum(origin.value == "accepted" for origin in event.origins)
                    answer.figures.add_round(event.draft_tokens, accepted)
                case SessionEnded() | SessionFailed():
                    answer.ended = event

    def _command(self, command: DraftCommand) -> None:
        pb = wire.draft_command_to_pb(command)
        self.traffic.commands += 1
        self.traffic.command_bytes += pb.ByteSize()
        events = self._drafts.apply(0, wire.draft_command_from_pb(pb))
        self._receive([event for _, event in events])

    def _receive(self, events: Sequence[DraftEvent]) -> None:
        for event in events:
            pb = wire.draft_event_to_pb(event)
            match wire.draft_event_from_pb(pb):
                case Proposal() as proposal:
                    self.traffic.proposals += 1
                    self.traffic.proposal_bytes += pb.ByteSize()
                    self.traffic.proposed_tokens += len(proposal.draft.token_ids)
                    self._take(self.scheduler.drafts.receive(DRAFTER.worker_id, proposal, 0.0))
                case DraftFailed() as failed:
                    self._take(self.scheduler.drafts.failed(DRAFTER.worker_id, failed))
