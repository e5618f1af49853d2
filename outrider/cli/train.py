"""`outrider train`: a draft model for a target, trained on what the target says."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from outrider.cli.models import resolve_model
from outrider.config import CACHE, setting
from outrider.config import command as settings_command
from outrider.model.embedded import EMBEDDED_MODEL

TARGET, SCRATCH = "target", "scratch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The target, what to learn from, and how."""

    model: str = setting(EMBEDDED_MODEL, help="The target: a transformers directory, or this name.")
    out: str = setting(help="Directory for the draft model, and for what is kept on the way.")
    prompts: tuple[str, ...] = setting(
        (),
        many=True,
        help="File of prompts: one a line, or JSON lines (.jsonl) with prompt, turns or messages. "
        "Without prompts and text the target invents prompts itself.",
    )
    text: tuple[str, ...] = setting((), many=True, help="File of plain text to learn from.")
    texts: str | None = setting(
        None, help="Directory for what the target writes; `texts` in --out if not given."
    )
    examples: int = setting(4000, at_least=10, help="Texts to learn from.")
    max_tokens: int = setting(128, at_least=2, help="Tokens of an answer.")
    most_prompt: int = setting(1024, at_least=1, help="Tokens of a prompt; longer ones are cut.")
    seats: int = setting(32, at_least=1, help="Texts that the target writes at once.")
    start: str = setting(
        TARGET,
        help="What to begin with: `target` for the target's own layers, `scratch` for random "
        "weights, or the directory of a draft model, to go on from it.",
    )
    config: str | None = setting(
        None, help="A config.json of a Llama with the sizes of the draft model."
    )
    layers: int = setting(1, at_least=1, help="Decoder layers of the draft model.")
    reads_hidden: bool = setting(
        True, help="Read the target's hidden states, or be a model of its own."
    )
    head_ids: int = setting(8192, at_least=2, help="Ids of the draft's head: the most frequent.")
    steps: int = setting(3000, at_least=1, help="Optimiser steps.")
    batch_tokens: int = setting(2000, at_least=1, help="Answer tokens of a step.")
    rate: float = setting(1e-3, at_least=0, help="Highest learning rate.")
    tv: float = setting(
        0.0, at_least=0, at_most=1, help="Share of total variation in the loss; the rest is KL."
    )
    unroll: int = setting(
        2, at_least=1, help="Tokens ahead that are learned in the last two fifths of the steps."
    )
    dropout: float = setting(
        0.1, at_least=0, at_most=0.9, help="Share of inputs that are left out by chance."
    )
    draft_len: int = setting(4, at_least=1, help="Tokens of a draft in the evaluation.")
    look_every: int = setting(200, at_least=1, help="Steps between looks at texts held out.")
    held_out: int = setting(64, at_least=1, help="Texts that are held out, at most.")
    seed: int = setting(0, at_least=0, at_most=2**31, help="Of texts, order and weights.")
    threads: int = setting(0, at_least=0, help="Threads; 0 leaves it to torch.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")


class Bar:
    """A progress bar on stderr; a line now and then where nobody watches."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._live = self._progress.console.is_terminal
        self._task: TaskID | None = None
        self._said = 0.0

    @contextmanager
    def stage(self, total: int) -> Iterator[None]:
        """A part of the work, of so many units."""
        self._task = self._progress.add_task("", total=total)
        if self._live:
            self._progress.start()
        try:
            yield
        finally:
            self._progress.stop()
            self._progress.remove_task(self._task)

    def show(self, what: str, done: int, *, seconds_left: float | None = None) -> None:
        """How far it is."""
        if self._task is not None:
            self._progress.update(self._task, description=what, completed=done)
        now = time.monotonic()
        if not self._live and now - self._said > 30:
            self._said = now
            rest = "" if seconds_left is None else f", {seconds_left / 60:.0f} min left"
            click.echo(f"{what}{rest}", err=True)


def run(settings: Settings) -> None:
    """Train a draft model on what the target says, and write it to a directory."""
    # Not at the top: torch takes seconds to import, and the group's help needs none of it.
    from outrider.training import job

    target = resolve_model(settings.model, settings.cache)
    bar = Bar()
    found = job.train(
        job.Order(
            target=target,
            out=Path(settings.out),
            texts=Path(settings.texts) if settings.texts else Path(settings.out) / "texts",
            prompts=settings.prompts,
            text=settings.text,
            examples=settings.examples,
            max_tokens=settings.max_tokens,
            most_prompt=settings.most_prompt,
            seats=settings.seats,
            from_target=settings.start == TARGET,
            from_draft=(
                None if settings.start in (TARGET, SCRATCH) else Path(settings.start).expanduser()
            ),
            config=Path(settings.config) if settings.config else None,
            layers=settings.layers,
            reads_hidden=settings.reads_hidden,
            head_ids=settings.head_ids,
            steps=settings.steps,
            batch_tokens=settings.batch_tokens,
            rate=settings.rate,
            tv=settings.tv,
            dropout=settings.dropout,
            unroll=settings.unroll,
            draft_len=settings.draft_len,
            look_every=settings.look_every,
            held_out=settings.held_out,
            seed=settings.seed,
            threads=settings.threads,
            command=" ".join(["outrider", *sys.argv[1:]]),
        ),
        bar,
    )
    click.echo(f"draft model in {settings.out}")
    click.echo(f"mean acceptance length on texts held out: {found.mean_length:.2f}")
    click.echo(json.dumps({**asdict(found), "mean_acceptance_length": round(found.mean_length, 4)}))


command = settings_command(Settings, run, name="train")
