"""Which start of a session counts, and who hears of it."""

from outrider.errors import FencedError
from outrider.messages import SessionFailed
from tests.support.scheduling import Worker
from verify_worker.state import ToCoordinator


def test_fencing_by_epoch() -> None:
    worker = Worker()
    worker.start(epoch=3)
    worker.start(epoch=3)
    assert isinstance(worker.ends.pop("s").error, FencedError)  # type: ignore[union-attr]
    worker.take(worker.scheduler.close("s", 2))
    assert worker.scheduler.sessions["s"].epoch == 3
    worker.start(epoch=4, tokens=[1, 2, 3, 4, 5, 6], prompt_len=5)
    assert worker.scheduler.sessions["s"].epoch == 4
    worker.take(worker.scheduler.close("s", 4))
    assert not worker.scheduler.sessions
    assert worker.scheduler.pool.free == worker.scheduler.pool.total


def test_an_owner_is_told_that_another_one_has_started_its_session() -> None:
    worker = Worker()
    worker.start(epoch=3)
    (failed,) = [
        output
        for output in worker.scheduler.start(worker.command(epoch=4), owner=2)
        if isinstance(output, ToCoordinator)
    ]
    assert failed.owner == 1
    assert isinstance(failed.event, SessionFailed)
    assert (failed.event.session_id, failed.event.epoch) == ("s", 3)
    assert isinstance(failed.event.error, FencedError)
    # An owner that starts its own again knows.
    again = worker.scheduler.start(worker.command(epoch=5), owner=2)
    assert not [output for output in again if isinstance(output, ToCoordinator)]
