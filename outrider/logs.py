"""Structured logs: one line an event, with the service, the worker and the session ids.

`logs.get(__name__).info("session started", session_id=…)`. Services write JSON to stderr,
or coloured lines when stderr is a terminal.
"""

import logging
import sys

import structlog

LEVELS = ("debug", "info", "warning", "error")


def configure(level: str, *, service: str, instance: str = "") -> None:
    """Set the level and the fields that every line of this process carries."""
    renderer: structlog.typing.Processor
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    else:
        renderer = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    fields = {"service": service, "instance": instance} if instance else {"service": service}
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**fields)


def get(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(module=name)
    return logger
