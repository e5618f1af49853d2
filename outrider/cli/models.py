"""What `--model` can name: a path, or the embedded model by its name."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from outrider.errors import ConfigError
from outrider.local.commands import WITH_DRAFT_MODEL
from outrider.model.embedded import EMBEDDED_MODEL, ensure_embedded_model, is_complete, model_dir
from outrider.model.shipped import SHIPPED_DRAFT, shipped_draft

# What stands for the best drafter that there is for a model.
AUTO_DRAFTER = "auto"
HYBRID, LOOKUP = "hybrid", "suffix"


def fetch_embedded_model(cache: str) -> Path:
    """The embedded model's directory, fetched with a progress bar if it is not there yet."""
    cache_dir = Path(cache).expanduser()
    if is_complete(model_dir(cache_dir)):
        return model_dir(cache_dir)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{EMBEDDED_MODEL}: starting", total=1.0)

        def show(step: str, done: float) -> None:
            bar.update(task, description=f"{EMBEDDED_MODEL}: {step}", completed=done)

        return ensure_embedded_model(cache_dir, show)


def resolve_model(model: str, cache: str) -> str:
    """The path of a model; the embedded one is fetched if need be.

    Raises:
        ConfigError: there is no such model.
    """
    path = Path(model).expanduser()
    if path.is_dir() or path.is_file():
        return str(path)
    if model == EMBEDDED_MODEL:
        return str(fetch_embedded_model(cache))
    if model == SHIPPED_DRAFT:
        return str(shipped_draft())
    raise ConfigError(
        f"no model at {model}: give a transformers directory, a .gguf file, "
        f"or the name {EMBEDDED_MODEL}, whose draft model is {SHIPPED_DRAFT}"
    )


def choose_drafter(drafter: str, draft_model: str, model: str) -> tuple[str, str]:
    """The drafter and the draft model to take, where `drafter` may be `auto`.

    The embedded model has a draft model of its own; others are drafted for by lookup.

    Raises:
        ConfigError: the two flags do not fit each other.
    """
    if drafter == AUTO_DRAFTER:
        if draft_model:
            return HYBRID, draft_model
        return (HYBRID, SHIPPED_DRAFT) if model == EMBEDDED_MODEL else (LOOKUP, "")
    if drafter in WITH_DRAFT_MODEL and not draft_model:
        if model == EMBEDDED_MODEL:
            return drafter, SHIPPED_DRAFT
        raise ConfigError(f"--drafter {drafter} needs --draft-model")
    if drafter not in WITH_DRAFT_MODEL and draft_model:
        raise ConfigError(f"--draft-model is of no use with --drafter {drafter}")
    return drafter, draft_model
