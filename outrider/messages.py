"""What the parts say to each other, as plain values; `outrider.wire` puts them on the wire.

Two numbers fence every message about a session:

epoch     raised at each placement or change of owner; a lower epoch is refused.
base_len  committed tokens, prompt included, before the message applies.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from outrider.errors import OutriderError


class FinishReason(Enum):
    """Why a session ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class TokenOrigin(Enum):
    """How a committed token came about."""

    PLAIN = "plain"
    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"


class AcceptanceRule(Enum):
    """How drafts are accepted; see docs/exactness.md."""

    COUPLED = "coupled"
    REJECTION = "rejection"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's distribution is processed and sampled.

    The processors, in the order in which they apply (docs/exactness.md):

    logit_bias: (id, bias) pairs, added to the logits.
    repetition_penalty: above 1 makes every id of prompt and completion less likely; 1 is off.
    frequency_penalty, presence_penalty: subtracted for each occurrence in the completion, and
        once for each id that occurs in it; 0 is off.
    bad_words: id sequences that never occur.
    min_tokens: stop ids are barred until the completion has that many tokens.
    allowed_ids: when not empty, nothing else is chosen.
    banned_ids: never chosen.
    temperature: 0 is greedy: the best of what is left, without what follows.
    top_k, top_p, min_p: 0, 1 and 0 keep every token.

    `seed` (64 bits, unsigned) keys the noise.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    allowed_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """Log-probabilities for each token: its own and those of the `top` best.

    They are of the target's raw distribution, or with `processed` of the one that the token
    was chosen from.
    """

    top: int = 0
    processed: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a committed token and (id, logprob) of the best, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Endings:
    """Where decoding ends, as far as token ids tell."""

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Whether to speculate, the draft length k and the rule.

    `draft_len` 0 leaves k to the worker's setting; with `auto_draft_len` it is chosen each
    round, whatever that says.
    """

    enabled: bool = True
    draft_len: int = 0
    rule: AcceptanceRule = AcceptanceRule.COUPLED
    auto_draft_len: bool = False


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """A distribution that is zero outside `token_ids`: weight over the sum of weights."""

    token_ids: tuple[int, ...]
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for one session.

    `parents[i]` is the index of the parent of token i, below i; -1 is the last committed
    token. Empty `parents` means a chain. `q` is empty unless the rule needs it. `priced`: what
    it was charged decided which tokens are in it (see `Price`).
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: tuple[SparseDistribution, ...] = ()
    priced: bool = False

    def cut(self, tokens: int) -> "Draft":
        """The first tokens of the draft."""
        return replace(
            self,
            token_ids=self.token_ids[:tokens],
            parents=self.parents[:tokens],
            q=self.q[:tokens],
        )

    @property
    def is_chain(self) -> bool:
        """Whether each token continues the one before it."""
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    @property
    def depths(self) -> tuple[int, ...]:
        """For each token how many tokens of the draft lead to it, itself included."""
        if not self.parents:
            return tuple(range(1, len(self.token_ids) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A dense row-major little-endian tensor; `dtype` is float32, bfloat16 or float16."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Timings:
    """Microseconds that one item spent on its way."""

    queue_us: int = 0
    compute_us: int = 0
    batch_sessions: int = 0


@dataclass(frozen=True, slots=True)
class DraftWorkerRef:
    """A draft worker as the coordinator names it to a verify worker; `address` is host:port.

    The operator vouches for a `trusted` one: the q that it reports is the q that it samples
    from. The rejection rule is exact only then.
    """

    worker_id: str
    address: str
    trusted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMessage:
    """What every message about a session carries."""

    session_id: str
    epoch: int


# --- coordinator -> verify worker ---------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSession(SessionMessage):
    """Begin, or begin again, from every committed token (prompt included).

    On behalf of `tenant`; the empty one is a tenant like any other.
    """

    token_ids: tuple[int, ...]
    prompt_len: int
    sampling: SamplingParams
    endings: Endings
    speculation: SpeculationOptions = SpeculationOptions()
    drafter: DraftWorkerRef | None = None
    logprobs: LogprobOptions | None = None
    traceparent: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession(SessionMessage):
    """Forget the session and free what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignDrafter(SessionMessage):
    """Use another draft worker from now on; None takes it away."""

    drafter: DraftWorkerRef | None


DecodeCommand: TypeAlias = StartSession | CloseSession | AssignDrafter


# --- verify worker -> coordinator ---------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(SessionMessage):
    """The tokens that one round committed after `base_len`.

    `origins` has one entry a token, and so has `logprobs` when they were asked for.
    `cached_tokens` are those of the prompt that the worker did not have to compute.
    """

    base_len: int
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    draft_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    timings: Timings = Timings()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded(SessionMessage):
    """The session met one of its endings; nothing about it follows."""

    reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFailed(SessionMessage):
    """The session can't go on; nothing about it follows."""

    error: OutriderError


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLost(SessionMessage):
    """The session goes on in plain steps and would take another draft worker."""

    worker_id: str
    error: OutriderError


DecodeEvent: TypeAlias = Progress | SessionEnded | SessionFailed | DrafterLost


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """How the verify worker is: for how long its engine is overdue, and whether it drains."""

    silent_ms: int = 0
    draining: bool = False


# --- verify worker -> draft worker --------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDraft(SessionMessage):
    """Begin, or begin again, from every committed token; `draft_len` 0 only prepares.

    Under the rejection rule the drafter samples from its own distribution q and reports it:
    its best `q_top` tokens (0: all of them). `prompt_len` and `stop_ids` serve the penalties
    and `min_tokens` of `sampling`. A draft may be a tree of up to `max_nodes` tokens; 0 asks
    for chains. Sessions with the same `corpus`, of one model and tenant, may be drafted from
    each other's outputs; an empty one has no others.
    """

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    prompt_len: int = 0
    stop_ids: frozenset[int] = frozenset()
    rule: AcceptanceRule = AcceptanceRule.COUPLED
    q_top: int = 0
    max_nodes: int = 0
    draft_len: int = 0
    traceparent: str = ""
    corpus: str = ""


@dataclass(frozen=True, slots=True)
class Price:
    """What a draft is charged, in committed tokens: for each token in it, for a second of work.

    A drafter that knows how likely its tokens are makes a tree of those that are worth it;
    without a price it drafts as far as it was asked to.
    """

    row: float = 0.0
    second: float = 0.0


FREE = Price()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitDraft(SessionMessage):
    """The target committed `token_ids` after `base_len`; propose `draft_len` tokens after them.

    Of a tree `draft_len` is the depth.
    `features` maps a layer to hidden states of shape [len(token_ids), hidden]: those that each
    token was made of; None where they came and could not be read.
    """

    base_len: int
    token_ids: tuple[int, ...]
    draft_len: int
    features: tuple[tuple[int, Tensor], ...] | None = ()
    price: Price = FREE


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseDraft(SessionMessage):
    """Forget the session."""


DraftCommand: TypeAlias = OpenDraft | CommitDraft | CloseDraft


# --- draft worker -> verify worker --------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal(SessionMessage):
    """A draft that continues `base_len` committed tokens; it may be shorter than asked.

    `draft_us` is what it cost: the time that the drafter worked for it, in all passes that it
    took, each as long as it was for everyone in it. `timings` speaks of the last pass.
    `feature_layers` are the layers of the target whose hidden states the drafter reads, and wants
    with every `CommitDraft` from now on; the number of its layers is what its head is given.
    """

    base_len: int
    draft: Draft
    timings: Timings = Timings()
    draft_us: int = 0
    feature_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFailed(SessionMessage):
    """The draft worker can't draft for the session (unknown there, full, or a fault)."""

    error: OutriderError


DraftEvent: TypeAlias = Proposal | DraftFailed
