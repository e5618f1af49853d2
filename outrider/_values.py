"""What the client SDK gives to its caller: plain, frozen values."""

from dataclasses import dataclass

from outrider.figures import SpeculationFigures
from outrider.messages import FinishReason, TokenLogprobs, TokenOrigin


@dataclass(frozen=True, slots=True)
class Piece:
    """One committed token and the text that it made certain.

    The text can be empty (half a character, or text that may still become a stop string) and
    can hold text that earlier pieces held back. `logprobs` is None unless they were asked for.
    """

    token_id: int
    text: str
    origin: TokenOrigin
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """What arrived at once: the tokens of one round, or the last held-back text (no pieces).

    `offset` counts the completion tokens before the first piece; `index` says which of `n`
    completions it belongs to, from 0.
    """

    offset: int
    text: str
    pieces: tuple[Piece, ...] = ()
    index: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of the pieces."""
        return tuple(piece.token_id for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that were read and written.

    `cached_tokens` of the prompt did not have to be computed: their KV was there already.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerateTimings:
    """Seconds from the arrival of the request at the coordinator."""

    first_token_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer, or what there is of it when it was cancelled.

    `seed` gives the same answer again, also alone if it was one of `n`; `index` says which.
    Figures and timings of a call that the caller broke off are zero: the coordinator tells
    them at the end. The prompt is there with `echo`; it is never part of `text`.
    """

    session_id: str
    model: str
    seed: int
    text: str
    pieces: tuple[Piece, ...]
    finish_reason: FinishReason
    usage: Usage
    speculation: SpeculationFigures
    timings: GenerateTimings
    index: int = 0
    prompt_text: str = ""
    prompt_token_ids: tuple[int, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of the completion, the end-of-sequence token included if it was chosen."""
        return tuple(piece.token_id for piece in self.pieces)

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """One for each of `token_ids`; empty unless they were asked for."""
        return tuple(piece.logprobs for piece in self.pieces if piece.logprobs is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """A session as its record says; `finish_reason` is None until it has finished.

    `state` is "running", "paused" (nobody follows it, so nothing is computed) or "finished".
    """

    session_id: str
    model: str
    state: str
    finish_reason: FinishReason | None
    epoch: int
    prompt_tokens: int
    token_ids: tuple[int, ...]
    verify_worker_id: str
    draft_worker_id: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that is served; `context_len` in tokens."""

    name: str
    fingerprint: str
    context_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker as the coordinator sees it; `pool` is "verify" or "draft".

    `model` is the target of a verify worker and the drafter of a draft worker; `connected`
    tells of verify workers whether their Decode stream is up, `dtype` and `numerics` how they
    compute. Sessions are not moved between workers that differ in these.
    """

    pool: str
    worker_id: str
    address: str
    incarnation: str
    model: str
    sessions: int
    capacity: int
    draining: bool
    connected: bool
    dtype: str
    numerics: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Workers, sessions and figures since the coordinator started."""

    workers: tuple[WorkerInfo, ...]
    running_sessions: int
    finished_sessions: int
    completion_tokens: int
    speculation: SpeculationFigures
    redis_reachable: bool
