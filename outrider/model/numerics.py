"""Which numerics a model runs with, chosen once at load.

`fast` batches freely. `invariant` gives a row the same bits whatever shares its step, and is
only handed out for a model on which that was seen to hold.
"""

from dataclasses import replace
from typing import Any

from outrider import logs
from outrider.errors import UnsupportedModelError
from outrider.model.fast import FastNumerics
from outrider.model.gguf import GgufWeights
from outrider.model.invariance import first_dependence
from outrider.model.invariant import InvariantNumerics
from outrider.model.lean import LeanDecoder
from outrider.model.linears.install import Packer, pack_module
from outrider.model.linears.kinds import DENSE, KINDS
from outrider.model.loading import LoadedModel
from outrider.model.paged import Numerics

FAST = "fast"
INVARIANT = "invariant"

# Which linears: what is measured to be quickest, the plain ones, or one kind by its name.
AUTO = "auto"
LINEARS = (AUTO, *(kind.name for kind in KINDS))

# 32 rows leave no remainder in vectorised loops, whatever the width.
_PASS_ROWS = 32


def choose_numerics(
    name: str, model: LoadedModel, *, linears: str = AUTO, lean: bool = True
) -> Numerics:
    """The numerics of that name; both replace the linears in `model`.

    `fast` lays weights out anew and takes them from the module, whose own forward can't be
    used afterwards. `linears` is one of `LINEARS`; without `lean` the model's own code runs.
    `invariant` has linears of its own; a model that is not invariant in passes of many rows
    runs row by row.

    Raises:
        UnsupportedModelError: the model can't be invariant here; the message says why.
    """
    if name == FAST:
        return _fast(model, linears, lean)
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


def _fast(model: LoadedModel, linears: str, lean: bool) -> Numerics:
    kinds = [kind for kind in KINDS if linears in (AUTO, kind.name) or kind is DENSE]
    if linears not in (AUTO, DENSE.name):
        kinds = [kind for kind in kinds if kind is not DENSE]
    quantised = None
    if model.gguf and linears == AUTO:
        quantised = GgufWeights(model.gguf, model.module)
    untyped: Any = model.module
    packer = Packer(
        kinds=kinds,
        quantised=quantised,
        kept=[untyped.get_input_embeddings().weight],
    )
    decoder = LeanDecoder.of(model.module, packer.fuse) if lean else None
    if decoder is None:
        pack_module(model.module, packer)
    for shape, choice in packer.choices.items():
        logs.get(__name__).debug("linear chosen", shape=shape, kind=choice.kind.name)
    return decoder or FastNumerics()


def _shared_experts(config: Any) -> str:
    """Why a mixture of experts can't run many rows at once, or nothing.

    Each expert gets the rows that chose it, so their number depends on the neighbours.
    """
    settings = config.get_text_config().to_dict()
    for name, value in settings.items():
        if "experts" in name and isinstance(value, int) and value > 1:
            return f"rows that choose the same of its {value} experts share a product"
    return ""
