"""`python -m coordinator`: settings from flags and environment, then the service."""

import asyncio
from dataclasses import replace

from coordinator.app import serve
from coordinator.config import Settings
from outrider import config, service


def run(settings: Settings) -> None:
    """Serve clients: sessions, the token log, placement and stop conditions."""
    settings = replace(
        settings, worker_id=settings.worker_id or service.new_worker_id("coordinator")
    )

    async def main(stop: asyncio.Event) -> None:
        await serve(settings, stop)

    service.run(
        main,
        service="coordinator",
        instance=settings.worker_id,
        log_level=settings.log_level,
        otlp_endpoint=settings.otlp_endpoint,
        metrics_host=settings.host,
        metrics_port=settings.metrics_port,
    )


command = config.command(Settings, run, name="coordinator")

if __name__ == "__main__":
    command()
