"""The drafters that flags name: in this process, or behind a whole system on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.hostile_drafter import HostileCommands
from bench.report import progress
from draft_worker import drafters
from draft_worker.config import DRAFTERS, WITH_DRAFT_MODEL
from draft_worker.config import Settings as DraftSettings
from outrider.drafting.base import Drafter
from outrider.errors import ConfigError
from outrider.local.commands import StackSettings
from outrider.local.stack import LocalStack

# Proposes ids by chance; there is no such drafter outside of the benchmarks.
RANDOM = "random"
WITH_RANDOM = (*DRAFTERS, RANDOM)


@dataclass(frozen=True, slots=True)
class Choice:
    """A drafter, and its draft model where it takes one.

    Raises:
        ConfigError: it takes one and has none, or the other way round.
    """

    drafter: str
    draft_model: str = ""

    def __post_init__(self) -> None:
        takes = self.drafter in WITH_DRAFT_MODEL
        if takes and not self.draft_model:
            raise ConfigError(f"--drafter {self.drafter} needs --draft-model PATH")
        if not takes and self.draft_model:
            raise ConfigError(f"--draft-model is of no use to --drafter {self.drafter}")

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.drafter} {Path(self.draft_model).name}".strip()


def choices(kinds: Sequence[str], draft_models: Sequence[str]) -> list[Choice]:
    """Each kind once, or once with each of the draft models where it takes one.

    Raises:
        ConfigError: a draft model is missing or of no use, or two have one name.
    """
    if draft_models and not set(kinds) & set(WITH_DRAFT_MODEL):
        raise ConfigError(f"--draft-model is of no use to --drafter {' and '.join(kinds)}")
    chosen = [
        Choice(kind, draft_model)
        for kind in dict.fromkeys(kinds)
        for draft_model in ((draft_models or ("",)) if kind in WITH_DRAFT_MODEL else ("",))
    ]
    names = [choice.name for choice in chosen]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"two drafters are called {', '.join(twice)}: name another directory")
    return chosen


def build(choice: Choice, target: str, threads: int) -> Drafter:
    """The drafter as a draft worker beside that target builds it."""
    settings = DraftSettings(
        redis_url="",
        drafter=choice.drafter,
        draft_model=choice.draft_model,
        target=target,
        threads=threads,
    )
    return drafters.build(settings).drafter


def stack(choice: Choice, target: str, *, threads: int) -> LocalStack:
    """A system with that drafter in which no prompt is helped by one that was there before.

    The threads are those of `StackSettings`.
    """
    hostile = choice.drafter == RANDOM
    settings = StackSettings(
        model=target,
        # What takes the place of the random one: it runs no model either.
        drafter="ngram" if hostile else choice.drafter,
        draft_model=choice.draft_model,
        threads=threads,
        verify_flags=("--no-prefix-cache",),
    )
    commands = HostileCommands(settings, "random") if hostile else None
    return LocalStack(settings, report=progress, commands=commands)
