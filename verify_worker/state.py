"""What the scheduler knows of a session, what a step is, and what came of it."""

from dataclasses import dataclass, field

from outrider.errors import OutriderError
from outrider.messages import (
    AcceptanceRule,
    DecodeEvent,
    Draft,
    DraftCommand,
    DraftWorkerRef,
    Endings,
    LogprobOptions,
    SamplingParams,
    SpeculationFigures,
    SpeculationOptions,
    TokenLogprobs,
)
from outrider.model.blocks import BlockTable
from outrider.sampling.acceptance import Verdict
from verify_worker.policy import Patience

NO_DRAFT = Draft()


@dataclass(slots=True)
class Want:
    """A proposal that was asked for and has not come."""

    base_len: int
    draft_len: int
    # Until then a step without the session is better than a plain step for it.
    wait_until_s: float


@dataclass(slots=True)
class Session:
    """One session on this worker.

    `owner` names the Decode stream that it answers to. `tokens` are the committed tokens,
    prompt included; between steps `table.kv_len` is len(tokens) - 1, or less while the
    prompt (or, after a preemption, everything) is still to be prefilled.
    """

    session_id: str
    epoch: int
    owner: int
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    endings: Endings
    speculation: SpeculationOptions
    logprobs: LogprobOptions | None = None
    traceparent: str = ""
    drafter: DraftWorkerRef | None = None
    table: BlockTable = field(default_factory=BlockTable)
    want: Want | None = None
    draft: Draft | None = None
    # When the last draft was asked for; what drafts have cost, and how long to do without.
    asked_at_s: float | None = None
    patience: Patience = field(default_factory=Patience)
    resume_at_len: int = 0
    reopened: int = 0
    figures: SpeculationFigures = field(default_factory=SpeculationFigures)

    @property
    def pending(self) -> int:
        """Committed tokens without KV; 1 between decoding steps."""
        return len(self.tokens) - self.table.kv_len

    @property
    def rule(self) -> AcceptanceRule:
        """The rule of acceptance; at temperature 0 both are the same, and coupled is simpler."""
        if self.sampling.temperature == 0:
            return AcceptanceRule.COUPLED
        return self.speculation.rule

    def may_use(self, drafter: DraftWorkerRef | None) -> DraftWorkerRef | None:
        """The draft worker if this session may have it: rejection needs an honest q."""
        if drafter is None or not self.speculation.enabled:
            return None
        if self.rule is AcceptanceRule.REJECTION and not drafter.trusted:
            return None
        return drafter

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.endings.max_new_tokens - (len(self.tokens) - self.prompt_len)


@dataclass(frozen=True, slots=True)
class Work:
    """What one session does in a step.

    The rows are the first `committed_rows` committed tokens without KV, then `draft`. With
    `decides`, the last committed token is among them: the step gives the next tokens.
    """

    session: Session
    committed_rows: int
    draft: Draft = NO_DRAFT
    decides: bool = True

    @property
    def rows(self) -> int:
        """How many rows the session takes."""
        return self.committed_rows + len(self.draft.token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the rows."""
        start = self.session.table.kv_len
        return [*self.session.tokens[start : start + self.committed_rows], *self.draft.token_ids]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: who works, and who gives up blocks for it."""

    work: tuple[Work, ...]
    preempted: tuple[Session, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the forward pass."""
        return sum(work.rows for work in self.work)


@dataclass(frozen=True, slots=True)
class Decided:
    """What a step decided for a session; `logprobs` one a token, when they were asked for."""

    verdict: Verdict
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a step, one entry a `Work`: a decision, an error, or None for a chunk."""

    results: tuple[Decided | OutriderError | None, ...]
    compute_s: float


@dataclass(frozen=True, slots=True)
class ToCoordinator:
    """An event for the Decode stream `owner`."""

    owner: int
    event: DecodeEvent


@dataclass(frozen=True, slots=True)
class ToDrafter:
    """A command for a draft worker."""

    worker: DraftWorkerRef
    command: DraftCommand


@dataclass(frozen=True, slots=True)
class LeaveDrafter:
    """Close the stream to a draft worker: nothing that it says matters any more."""

    worker_id: str


Output = ToCoordinator | ToDrafter | LeaveDrafter


@dataclass(slots=True)
class Counters:
    """What happened since the worker started."""

    speculation: SpeculationFigures = field(default_factory=SpeculationFigures)
    steps: int = 0
    rows: int = 0
    committed_tokens: int = 0
    compute_s: float = 0.0
    stale_proposals: int = 0
    malformed_proposals: int = 0
    missed_proposals: int = 0
    preemptions: int = 0
    failed_sessions: int = 0
