"""What a draft worker counts, and how it is exported."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from opentelemetry.metrics import CallbackOptions, Histogram, Observation

from outrider import telemetry


def _forward_seconds() -> Histogram:
    return telemetry.meter(__name__).create_histogram(
        "outrider.draft.propose.duration",
        unit="s",
        description="Time that the drafter took for one batch of sessions",
    )


@dataclass(slots=True)
class Figures:
    """Counts since the start; written by the engine's thread, read by anyone."""

    sessions: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    superseded: int = 0
    failed: int = 0
    malformed_features: int = 0
    batches: int = 0
    batched_sessions: int = 0
    # Committed tokens of a drafter that reads hidden states, and those that came with theirs.
    committed_tokens: int = 0
    committed_states: int = 0
    _seconds: Histogram = field(default_factory=_forward_seconds)

    def batch(self, sessions: int, seconds: float) -> None:
        """Count one call of the drafter for `sessions` sessions."""
        self.batches += 1
        self.batched_sessions += sessions
        self._seconds.record(seconds)

    def commits(self, tokens: int, states: int) -> None:
        """Count tokens that the target committed, and how many came with their hidden states."""
        self.committed_tokens += tokens
        self.committed_states += states


def export(figures: Figures) -> None:
    """Export every count from now on, also while the worker is idle."""

    def counter(instrument: str, read: Callable[[], float], description: str) -> None:
        telemetry.observe(__name__, f"outrider.draft.{instrument}", read, description=description)

    counter("drafts", lambda: figures.drafts, "Proposals sent")
    counter("draft_tokens", lambda: figures.draft_tokens, "Tokens in the proposals sent")
    counter("superseded", lambda: figures.superseded, "Wants that a newer commit replaced")
    counter("failed", lambda: figures.failed, "Sessions that made the drafter fail")
    counter("malformed_features", lambda: figures.malformed_features, "Malformed features")
    counter("batches", lambda: figures.batches, "Calls of the drafter")
    counter("batched_sessions", lambda: figures.batched_sessions, "Sessions in those calls")

    counter(
        "committed_tokens",
        lambda: figures.committed_tokens,
        "Tokens committed to a drafter that reads hidden states",
    )
    counter("committed_states", lambda: figures.committed_states, "Those that came with theirs")

    def sessions(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(figures.sessions)]

    telemetry.meter(__name__).create_observable_gauge(
        "outrider.draft.sessions", callbacks=[sessions], description="Sessions held now"
    )
