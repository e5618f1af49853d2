"""What the sessions of a coordinator share."""

from dataclasses import dataclass

from coordinator.figures import Figures
from coordinator.log_writer import LogWriter
from coordinator.pool import WorkerPool


@dataclass(frozen=True, slots=True)
class Services:
    """The workers, the records and the figures.

    `place_wait_s` and `replace_wait_s`: how long a new session, and one that was on a verify
    worker before, waits for one.
    """

    pool: WorkerPool
    writer: LogWriter
    figures: Figures
    place_wait_s: float
    replace_wait_s: float
