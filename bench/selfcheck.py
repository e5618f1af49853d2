"""What the check of a model at start finds: right pages, and each way to get them wrong.

In units of what rounding does to the model's own logits; see `outrider.model.selfcheck`.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from bench.faults import FAULTS, Fault
from bench.report import Bar, Report, progress
from outrider.cli.models import resolve_model
from outrider.config import CACHE, setting
from outrider.errors import UnsupportedModelError
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.loading import DTYPES, LoadedModel, load_model
from outrider.model.paged import PagedModel
from outrider.model.selfcheck import LIMITS, Comparison, OwnLogits, compare

RIGHT = "right"
# Past any window that the check passes.
BLOCKS = 120


@dataclass(frozen=True, slots=True)
class Settings:
    """What to check."""

    model: str = setting(EMBEDDED_MODEL, help="A path, or this name.")
    dtypes: tuple[str, ...] = setting(
        tuple(DTYPES), many=True, choices=tuple(DTYPES), help="Types to try."
    )
    threads: int = setting(0, at_least=0, help="Threads of torch; 0 leaves it to torch.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="Exit with 1 when a right model is near the limit.")


def found(own: OwnLogits, model: LoadedModel, fault: Fault) -> Comparison:
    """What the check finds with the fault."""
    with fault():
        return compare(own, PagedModel(model, BLOCKS))


def run(settings: Settings) -> None:
    """Measure the check at start with right pages and with wrong ones."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    path = resolve_model(settings.model, settings.cache)
    names = [RIGHT, *FAULTS]
    report = Report("Check at start: difference over what rounding does", ["", *settings.dtypes])
    table: dict[str, list[str]] = {name: [] for name in ("limit", *names)}
    for dtype in settings.dtypes:
        model, limit = load_model(path, dtype=dtype), LIMITS[DTYPES[dtype]]
        own = OwnLogits.of(model)
        if own is None:
            raise UnsupportedModelError(f"the context of {model.name} is too small for the check")
        comparisons = {name: found(own, model, FAULTS.get(name, nullcontext)) for name in names}
        ratios = {name: comparison.ratio for name, comparison in comparisons.items()}
        table["limit"].append(f"{limit:g}")
        for name, ratio in ratios.items():
            changes_nothing = name != RIGHT and ratio == ratios[RIGHT]
            table[name].append("no effect" if changes_nothing else f"{ratio:,.1f}")
        rounding = comparisons[RIGHT].rounding
        report.figures[dtype] = {"rounding": rounding, "limit": limit, "ratios": ratios}
        room = limit / ratios[RIGHT] if ratios[RIGHT] else float("inf")
        report.bars.append(Bar(f"{dtype}: far from the limit", room > 3, f"{room:.1f} times"))
        progress(f"{dtype}: rounding {rounding:.2g}")
    report.rows += [[name, *cells] for name, cells in table.items()]
    report.print()
    report.exit(enforce=settings.bar)
