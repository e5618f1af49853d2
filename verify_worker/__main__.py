"""`python -m verify_worker`."""

from outrider import service
from outrider.config import command
from verify_worker.app import VerifyWorker
from verify_worker.config import Settings


def run(settings: Settings) -> None:
    """Run the target model and verify drafts for coordinators until SIGTERM."""
    worker_id = settings.worker_id or service.new_worker_id("verify")
    service.run(
        VerifyWorker(settings, worker_id).run,
        service="verify-worker",
        instance=worker_id,
        log_level=settings.log_level,
        otlp_endpoint=settings.otlp_endpoint,
        metrics_host=settings.host,
        metrics_port=settings.metrics_port,
    )


if __name__ == "__main__":
    command(Settings, run, name="verify-worker")()
