"""`python -m draft_worker`."""

from draft_worker.app import DraftWorker
from draft_worker.config import Settings
from outrider import service
from outrider.config import command


def run(settings: Settings) -> None:
    """Propose tokens to verify workers until SIGTERM."""
    worker_id = settings.worker_id or service.new_worker_id("draft")
    service.run(
        lambda stop: DraftWorker(settings, worker_id).run(stop),
        service="draft-worker",
        instance=worker_id,
        log_level=settings.log_level,
        otlp_endpoint=settings.otlp_endpoint,
        metrics_host=settings.host,
        metrics_port=settings.metrics_port,
    )


if __name__ == "__main__":
    command(Settings, run, name="draft-worker")()
