"""What the scheduler knows of a session, what a step is, and what came of it."""

from dataclasses import dataclass, field

from outrider.errors import OutriderError
from outrider.figures import SpeculationFigures
from outrider.messages import (
    FREE,
    AcceptanceRule,
    DecodeEvent,
    Draft,
    DraftCommand,
    DraftWorkerRef,
    Endings,
    LogprobOptions,
    Price,
    SamplingParams,
    SpeculationOptions,
    Tensor,
    TokenLogprobs,
)
from outrider.model.blocks import BlockTable
from outrider.sampling.acceptance import Verdict
from verify_worker.cost import NOTHING, StepShape
from verify_worker.draft_demand import Appetite
from verify_worker.draft_length import SESSION_HALF_LIFE_TOKENS, Choice, Record
from verify_worker.policy import Patience
from verify_worker.waiting import Sample

NO_DRAFT = Draft()


@dataclass(slots=True)
class Want:
    """A proposal that was asked for and has not come."""

    base_len: int
    draft_len: int
    # Until then a step without the session is better than a plain step for it.
    wait_until_s: float
    price: Price = FREE


@dataclass(slots=True)
class Late:
    """A proposal that was missed, and may still come: then it shows what it was worth."""

    base_len: int
    draft_len: int
    asked_at_s: float
    sample: Sample
    # Whether it was asked for without hope.
    looks: bool = False
    draft: Draft = NO_DRAFT


@dataclass(slots=True)
class Told:
    """How much of a session its draft worker knows.

    `tokens`: how many of its tokens; 0 before it is opened. `hidden` are the hidden states
    [tokens, size] of those after them, round by round; None where a round has none.
    """

    tokens: int = 0
    hidden: list[Tensor | None] = field(default_factory=list)


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
    tenant: str = ""
    drafter: DraftWorkerRef | None = None
    told: Told = field(default_factory=Told)
    table: BlockTable = field(default_factory=BlockTable)
    want: Want | None = None
    draft: Draft | None = None
    # When the last draft was asked for, of how many tokens, and the one that was missed.
    asked_at_s: float | None = None
    asked_len: int = 0
    # Whether it was asked for without hope.
    looks: bool = False
    late: Late | None = None
    # Since when nothing is left to wait for.
    ready_at_s: float = 0.0
    # What drafts have cost; what came of them, and at which length that last faded; until when
    # to do without, until when not to ask for those that are not worth a wait, and not to reckon
    # again whether they are.
    patience: Patience = field(default_factory=Patience)
    record: Record = field(default_factory=Record)
    recorded_len: int = 0
    resume_at_len: int = 0
    look_at_len: int = 0
    choose_at_len: int = 0
    # How far it drafts, if that was reckoned, and whether it pays with those it steps with.
    choice: Choice | None = None
    shares: bool = False
    # Whether its drafter heeds prices; None as long as it has said nothing for this session.
    heeds_price: bool | None = None
    reopened: int = 0
    # What it would ask for, if draft workers had nothing else to do.
    appetite: Appetite = field(default_factory=Appetite)
    figures: SpeculationFigures = field(default_factory=SpeculationFigures)
    # Hashes of the full blocks of its tokens; how much of its prompt did not have to be computed.
    chain: list[bytes] = field(default_factory=list)
    cached_tokens: int = 0

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

    def ask_nothing(self) -> None:
        """Forget the draft that came, and the one that was asked for."""
        self.draft = self.want = self.asked_at_s = None

    def fade_record(self) -> None:
        """Let what is known of the session's drafts fade with the tokens committed since."""
        tokens = len(self.tokens) - self.recorded_len
        if tokens > 0 and self.record.drafts:
            self.record.fade(0.5 ** (tokens / SESSION_HALF_LIFE_TOKENS))
        self.recorded_len = len(self.tokens)

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
class Adoption:
    """Sealed blocks that follow the full blocks of a session, and its `kv_len` with them."""

    blocks: tuple[int, ...]
    kv_len: int


@dataclass(frozen=True, slots=True)
class Work:
    """What one session does in a step.

    The rows are the first `committed_rows` committed tokens without KV, then `draft`, one row a
    token or node. With `decides`, the last committed token is among them: the step gives the
    next tokens. The blocks of `adoption` come before the rows. `keeps_hidden` asks for the hidden
    states that the tokens are made of.
    """

    session: Session
    committed_rows: int
    draft: Draft = NO_DRAFT
    decides: bool = True
    adoption: Adoption | None = None
    keeps_hidden: bool = False

    @property
    def start(self) -> int:
        """How many tokens come before the rows."""
        return self.adoption.kv_len if self.adoption else self.session.table.kv_len

    @property
    def rows(self) -> int:
        """How many rows the session takes."""
        return self.committed_rows + len(self.draft.token_ids)

    @property
    def parents(self) -> tuple[int, ...]:
        """The parents of the draft's rows where it is a tree; empty for a chain."""
        return () if self.draft.is_chain else self.draft.parents

    @property
    def shape(self) -> StepShape:
        """Its part of the step."""
        return StepShape.of(self.rows, self.start + self.rows)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the rows."""
        start = self.start
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

    @property
    def shape(self) -> StepShape:
        """What the step is made of, as long as it has not run."""
        return sum((work.shape for work in self.work), NOTHING)


@dataclass(frozen=True, slots=True)
class Decided:
    """What a step decided for a session; `logprobs` one a token, when they were asked for.

    `hidden` [tokens, hidden] is what the target's head made each token of, when it was asked for.
    """

    verdict: Verdict
    logprobs: tuple[TokenLogprobs, ...] = ()
    hidden: Tensor | None = None


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
    # Tokens of sessions that got their first blocks, and those that were cached.
    prefix_queries: int = 0
    prefix_hits: int = 0
