"""What this coordinator has done since it started, for GetStatus and for metrics.

The counters of speculation follow vLLM's set. Every counter is exported from the start, so
that an idle coordinator shows 0 and not nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from outrider import telemetry
from outrider.figures import SpeculationFigures
from outrider.messages import FinishReason


class Figures:
    """Totals over all sessions of this coordinator."""

    def __init__(self) -> None:
        self.finished_sessions = 0
        self.completion_tokens = 0
        self.speculation = SpeculationFigures()
        meter = telemetry.meter(__name__)
        counter = meter.create_counter
        self._started = counter(
            "outrider_sessions_started", description="Sessions that began to decode."
        )
        self._finished = counter(
            "outrider_sessions_finished", description="Sessions that ended, by reason."
        )
        self._paused = counter(
            "outrider_sessions_paused", description="Sessions that were left to be resumed."
        )
        self._resumed = counter(
            "outrider_sessions_resumed", description="Sessions that were taken over for a client."
        )
        self._tokens = counter(
            "outrider_completion_tokens", description="Tokens committed after prompts."
        )
        self._drafts = counter(
            "outrider_delivered_spec_decode_num_drafts", description="Drafts that were verified."
        )
        self._draft_tokens = counter(
            "outrider_delivered_spec_decode_num_draft_tokens", description="Draft tokens verified."
        )
        self._accepted_tokens = counter(
            "outrider_delivered_spec_decode_num_accepted_tokens",
            description="Draft tokens accepted.",
        )
        self._accepted_per_position = counter(
            "outrider_delivered_spec_decode_num_accepted_tokens_per_pos",
            description="Draft tokens accepted, by their position in the draft.",
        )
        self._streams = meter.create_up_down_counter(
            "outrider_streams_open", description="Calls of clients that follow a completion."
        )
        self._streams.add(0)
        plain = (self._started, self._paused, self._resumed, self._tokens, self._drafts)
        for instrument in (*plain, self._draft_tokens, self._accepted_tokens):
            instrument.add(0)
        for reason in FinishReason:
            self._finished.add(0, {"reason": reason.value})
        self._accepted_per_position.add(0, {"position": 0})

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a client's stream while it is open."""
        self._streams.add(1)
        try:
            yield
        finally:
            self._streams.add(-1)

    def started(self) -> None:
        """Count a session that was placed for the first time."""
        self._started.add(1)

    def paused(self) -> None:
        """Count a session that was left to be resumed."""
        self._paused.add(1)

    def resumed(self) -> None:
        """Count a session that was taken over for a client."""
        self._resumed.add(1)

    def committed(self, tokens: int, draft_tokens: int, accepted_tokens: int) -> None:
        """Count what was kept of one round."""
        self.completion_tokens += tokens
        self._tokens.add(tokens)
        self.speculation.add_round(draft_tokens, accepted_tokens)
        if not draft_tokens:
            return
        self._drafts.add(1)
        self._draft_tokens.add(draft_tokens)
        self._accepted_tokens.add(accepted_tokens)
        for position in range(accepted_tokens):
            self._accepted_per_position.add(1, {"position": position})

    def finished(self, reason: FinishReason) -> None:
        """Count a session that ended."""
        self.finished_sessions += 1
        self._finished.add(1, {"reason": reason.value})
