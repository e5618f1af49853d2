"""Which numerics a model runs with, chosen once at load.

`fast` batches freely. `invariant` gives a row the same bits whatever shares its step, and is
only handed out for a model on which that was seen to hold.
"""

from dataclasses import replace
from typing import Any

from outrider import logs
from outrider.errors import UnsupportedModelError
from outrider.model.fast import FastNumerics
from outrider.model.invariance import first_dependence
from outrider.model.invariant import InvariantNumerics
from outrider.model.loading import LoadedModel
from outrider.model.paged import Numerics

FAST = "fast"
INVARIANT = "invariant"

# 32 rows leave no remainder in vectorised loops, whatever the width.
_PASS_ROWS = 32


def choose_numerics(name: str, model: LoadedModel) -> Numerics:
    """The numerics of that name; `invariant` replaces the linears in `model`.

    A model that is not invariant in passes of many rows runs row by row.

    Raises:
        UnsupportedModelError: the model can't be invariant here; the message says why.
    """
    if name == FAST:
        return FastNumerics()
    numerics = InvariantNumerics(_PASS_ROWS)
    numerics.prepare(model.module)
    reason = _shared_experts(model.module.config) or first_dependence(model, numerics)
    if reason:
        logs.get(__name__).warning(
            "invariant numerics run one row at a time", model=model.name, reason=reason
        )
        numerics = replace(numerics, pass_rows=1)
        reason = first_dependence(model, numerics)
    if reason:
        raise UnsupportedModelError(
            f"{model.name} can't be served with --numerics {INVARIANT}: {reason}, even one row at "
            f"a time; use --numerics {FAST}"
        )
    return numerics


def _shared_experts(config: Any) -> str:
    """Why a mixture of experts can't run many rows at once, or nothing.

    Each expert gets the rows that chose it, so their number depends on the neighbours.
    """
    settings = config.get_text_config().to_dict()
    for name, value in settings.items():
        if "experts" in name and isinstance(value, int) and value > 1:
            return f"rows that choose the same of its {value} experts share a product"
    return ""
