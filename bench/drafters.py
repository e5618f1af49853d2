"""The drafters that flags name: in this process, or behind a whole system on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.hostile_drafter import HostileCommands
from bench.report import progress
from draft_worker import drafters
from draft_worker.config import DRAFTERS, WITH_DRAFT_MODEL
from draft_worker.config import Settings as DraftSettings
from outrider.cli.models import AUTO_DRAFTER, choose_drafter, resolve_model
from outrider.drafting.base import Drafter
from outrider.errors import ConfigError
from outrider.local.commands import StackSettings
from outrider.local.stack import LocalStack

# Proposes ids by chance; there is no such drafter outside of the benchmarks.
RANDOM = "random"
KINDS = (AUTO_DRAFTER, *DRAFTERS)


@dataclass(frozen=True, slots=True)
class Choice:
    """A drafter, and its draft model (a path, or the name of one) where it takes one."""

    drafter: str
    draft_model: str = ""

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.drafter} {Path(self.draft_model).name}".strip()

    def resolved(self, cache: str) -> "Choice":
        """With the path of the draft model; see `resolve_model`."""
        path = self.draft_model and resolve_model(self.draft_model, cache)
        return replace(self, draft_model=path)


def choose(kind: str, draft_model: str, model: str) -> Choice:
    """What flags mean for a target, as `outrider up` takes them; or the random drafter.

    Raises:
        ConfigError: they do not fit each other.
    """
    if kind != RANDOM:
        return Choice(*choose_drafter(kind, draft_model, model))
    if draft_model:
        raise ConfigError(f"--draft-model is of no use with --drafter {kind}")
    return Choice(RANDOM)


def choose_all(kinds: Sequence[str], draft_models: Sequence[str], model: str) -> list[Choice]:
    """Each kind once, or once with each of the draft models where it takes one.

    Raises:
        ConfigError: a draft model is missing or of no use, or two have one name.
    """
    taking = {AUTO_DRAFTER, *WITH_DRAFT_MODEL}
    if draft_models and not set(kinds) & taking:
        raise ConfigError(f"--draft-model is of no use with --drafter {' and '.join(kinds)}")
    chosen = [
        choose(kind, draft_model, model)
        for kind in dict.fromkeys(kinds)
        for draft_model in ((draft_models or ("",)) if kind in taking else ("",))
    ]
    chosen = list(dict.fromkeys(chosen))
    names = [choice.name for choice in chosen]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"two drafters are called {', '.join(twice)}: name another directory")
    return chosen


def build(choice: Choice, target: str, threads: int) -> Drafter:
    """The drafter of a resolved choice as a draft worker beside that target builds it."""
    settings = DraftSettings(
        redis_url="",
        drafter=choice.drafter,
        draft_model=choice.draft_model,
        target=target,
        threads=threads,
    )
    return drafters.build(settings).drafter


def stack_settings(choice: Choice, target: str, threads: int) -> StackSettings:
    """A system with the drafter of a resolved choice; for the threads see `StackSettings`.

    No prompt is helped by one that was there before.
    """
    return StackSettings(
        model=target,
        # What the random one takes the place of: it runs no model either.
        drafter="ngram" if choice.drafter == RANDOM else choice.drafter,
        draft_model=choice.draft_model,
        threads=threads,
        verify_flags=("--no-prefix-cache",),
    )


def stack(choice: Choice, target: str, *, threads: int) -> LocalStack:
    """That system, to be started."""
    settings = stack_settings(choice, target, threads)
    commands = HostileCommands(settings, "random") if choice.drafter == RANDOM else None
    return LocalStack(settings, report=progress, commands=commands)
