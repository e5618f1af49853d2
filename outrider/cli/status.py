"""`outrider status`."""

import json
from dataclasses import asdict, dataclass

import click
from rich.console import Console
from rich.table import Table

from outrider.cli.connection import ConnectionSettings
from outrider.cli.display import speculation_json, speculation_line
from outrider.client import ModelInfo, Status
from outrider.config import command as settings_command
from outrider.config import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ConnectionSettings):
    """What to ask whom."""

    json: bool = setting(False, help="Print one JSON object.")


def run(settings: Settings) -> None:
    """Show workers, sessions and figures as the first coordinator that answers sees them."""
    with settings.client() as client:
        status, models = client.status(), client.list_models()
    if settings.json:
        found = asdict(status) | {
            "speculation": speculation_json(status.speculation),
            "models": [asdict(model) for model in models],
        }
        click.echo(json.dumps(found))
        return
    console = Console()
    console.print(_models(models))
    console.print(_workers(status))
    click.echo(
        f"sessions: {status.running_sessions} running, {status.finished_sessions} finished, "
        f"{status.completion_tokens} tokens generated"
    )
    click.echo(f"speculation: {speculation_line(status.speculation)}")
    click.echo(f"records (Redis): {'reachable' if status.redis_reachable else 'UNREACHABLE'}")


def _models(models: tuple[ModelInfo, ...]) -> Table:
    table = Table("model", "context", "fingerprint", title="models", title_justify="left")
    for model in models:
        table.add_row(model.name, str(model.context_len), model.fingerprint[:12])
    return table


def _workers(status: Status) -> Table:
    table = Table(
        "pool", "worker", "address", "model", "sessions", "state",
        title="workers", title_justify="left",
    )  # fmt: skip
    for worker in status.workers:
        state = "draining" if worker.draining else "up"
        if worker.pool == "verify" and not worker.connected:
            state = "not connected"
        load = f"{worker.sessions} / {worker.capacity}"
        # How it computes goes below the model, so that the table fits a narrow terminal.
        computing = "/".join(filter(None, (worker.dtype, worker.numerics)))
        model = f"{worker.model}\n{computing}" if computing else worker.model
        table.add_row(worker.pool, worker.worker_id, worker.address, model, load, state)
    return table


command = settings_command(Settings, run, name="status")
