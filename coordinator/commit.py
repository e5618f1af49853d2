"""The commit step: the only place where output is cut.

Token by token it looks for stop ids, stop strings, the token cap and the context limit. What
a client is shown, what it is billed, and the figures all come from the tokens kept here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.detokenizer import Detokenizer
from coordinator.stop_strings import StopStrings
from outrider.errors import InternalError
from outrider.figures import SpeculationFigures
from outrider.messages import (
    FinishReason,
    Progress,
    TokenLogprobs,
    TokenOrigin,
)


@dataclass(frozen=True, slots=True)
class Piece:
    """One committed token and the text that it made certain; `logprobs` if they are wanted.

    `origin` is None for a token that comes from the log, which does not tell.
    """

    token_id: int
    text: str
    origin: TokenOrigin | None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a session ends at the latest, in tokens; `context_len` counts the prompt too."""

    prompt_len: int
    max_tokens: int
    context_len: int

    @property
    def max_new_tokens(self) -> int:
        """Most tokens after the prompt."""
        return min(self.max_tokens, self.context_len - self.prompt_len)


class CommitStep:
    """The completion of one session.

    The first token in `stop_ids` is kept and has no text. The first stop string cuts the
    text where it begins (with `include_stop`: where it ends) and the tokens after the one
    that completed it.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        limits: Limits,
        stop_ids: frozenset[int],
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
    ) -> None:
        self.limits = limits
        self.token_ids: list[int] = []
        self.figures = SpeculationFigures()
        self.finish_reason: FinishReason | None = None
        # Of the prompt, the tokens that the first verify worker did not have to compute.
        self.cached_tokens = 0
        self._detokenizer = detokenizer
        self._stop_ids = stop_ids
        self._stop = StopStrings(stop, include=include_stop)
        self._cut = False

    def commit(
        self,
        token_ids: Sequence[int],
        origins: Sequence[TokenOrigin],
        draft_tokens: int = 0,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> list[Piece]:
        """Keep the tokens of one round up to the first ending.

        `draft_tokens` is how many draft tokens the round verified; `logprobs` has one entry a
        token, or none at all. Once `finish_reason` is set, nothing is kept any more. Of a
        round that is cut, only what was kept counts, as if its draft had been that short.
        """
        pieces: list[Piece] = []
        of_token: Sequence[TokenLogprobs | None] = logprobs or [None] * len(token_ids)
        for token_id, origin, logprob in zip(token_ids, origins, of_token, strict=True):
            if self.finish_reason is not None:
                break
            pieces.append(Piece(token_id, self._keep(token_id), origin, logprob))
        if pieces:
            verified = draft_tokens
            if len(pieces) < len(token_ids):
                verified = min(draft_tokens, len(pieces))
            accepted = sum(piece.origin is TokenOrigin.ACCEPTED for piece in pieces)
            self.figures.add_round(verified, accepted)
        return pieces

    def replay(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()
    ) -> list[Piece]:
        """Keep tokens that were kept before, as they are in the log; `figures` stay as they are.

        Where they end the session, or their text is cut, is found again.
        """
        of_token: Sequence[TokenLogprobs | None] = logprobs or [None] * len(token_ids)
        return [
            Piece(token_id, self._keep(token_id), None, logprob)
            for token_id, logprob in zip(token_ids, of_token, strict=True)
        ]

    def end(self, reason: FinishReason) -> None:
        """End for a reason that no token tells; the first reason stays."""
        self.finish_reason = self.finish_reason or reason

    def flush(self) -> str:
        """The text that was still held back; call it once, after the end."""
        if self._cut:
            return ""
        shown, cut = self._stop.push(self._detokenizer.flush())
        return shown if cut else shown + self._stop.flush()

    def _keep(self, token_id: int) -> str:
        self.token_ids.append(token_id)
        if token_id in self._stop_ids:
            self.finish_reason = FinishReason.STOP
            return ""
        text, self._cut = self._stop.push(self._detokenizer.push(token_id))
        if self._cut:
            self.finish_reason = FinishReason.STOP
        elif len(self.token_ids) >= self.limits.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH
        return text


def logprobs_of(event: Progress, worker_id: str, *, wanted: bool) -> tuple[TokenLogprobs, ...]:
    """Those of the tokens that a round of a worker committed, if they are wanted; else none.

    Raises:
        InternalError: some are missing.
    """
    if not wanted:
        return ()
    if len(event.logprobs) != len(event.token_ids):
        raise InternalError(
            f"verify worker {worker_id} sent tokens of session {event.session_id} without the "
            "logprobs that were asked for; is it of an older version?"
        )
    return event.logprobs
