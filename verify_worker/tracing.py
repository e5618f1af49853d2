"""One span a session: from its start here to its end, with its figures as attributes."""

from dataclasses import replace

from opentelemetry import trace

from outrider import telemetry
from outrider.messages import SessionEnded, SessionFailed, StartSession
from verify_worker.state import Output, ToCoordinator


class SessionSpans:
    """The open spans by session id; the engine's thread alone uses it."""

    def __init__(self) -> None:
        self._tracer = telemetry.tracer(__name__)
        self._spans: dict[str, trace.Span] = {}

    def begin(self, command: StartSession) -> StartSession:
        """Open the session's span; the command that comes back carries it to the drafter."""
        if not command.traceparent:
            return command
        self.end(command.session_id)
        context = telemetry.context_of(command.traceparent)
        attributes: dict[str, str | int] = {
            "outrider.session_id": command.session_id,
            "outrider.epoch": command.epoch,
        }
        span = self._tracer.start_span("verify.session", context, attributes=attributes)
        self._spans[command.session_id] = span
        own = telemetry.traceparent(trace.set_span_in_context(span))
        return replace(command, traceparent=own or command.traceparent)

    def observe(self, outputs: list[Output]) -> None:
        """End the spans of the sessions that ended."""
        for output in outputs if self._spans else ():
            if isinstance(output, ToCoordinator) and isinstance(
                output.event, SessionEnded | SessionFailed
            ):
                self.end(output.event.session_id)

    def end(self, session_id: str) -> None:
        """End one span, if it is open."""
        span = self._spans.pop(session_id, None)
        if span is not None:
            span.end()
