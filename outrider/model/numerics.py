"""Which numerics a model runs with, chosen once at load.

`fast` batches freely. `invariant` gives a row the same bits whatever shares its step, and is
only handed out for a model on which that was seen to hold.
"""

from dataclasses import replace
from typing import Any

from outrider import logs
from outrider.errors import UnsupportedModelError
from outrider.model import flex
from outrider.model.fast import FastNumerics
from outrider.model.flex import AttentionKind, choose_attention
from outrider.model.gguf import GgufWeights
from outrider.model.invariance import first_dependence
from outrider.model.invariant import InvariantNumerics
from outrider.model.lean import LeanDecoder
from outrider.model.linears.install import Packer, pack_module
from outrider.model.linears.kinds import KINDS
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
    name: str,
    model: LoadedModel,
    *,
    linears: str = AUTO,
    lean: bool = True,
    attention: str = flex.SDPA,
    release: bool = True,
) -> Numerics:
    """The numerics of that name; both replace the linears in `model`.

    `fast` lays weights out anew and, unless told not to `release` them, takes them from the
    module, whose own forward can't be used afterwards. `linears` is one of `LINEARS`,
    `attention` one of `flex.ATTENTIONS`; without `lean` the model's own code runs. `invariant`
    has linears of its own; a model that is not invariant in passes of many rows
    runs row by row.

    Raises:
        UnsupportedModelError: the model can't be invariant here; the message says why.
    """
    if name == FAST:
        packer = _packer(model, linears, release)
        return _fast(model, packer, choose_attention(attention, model.module.device), lean)
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


def packs(model: LoadedModel, numerics: str, linears: str) -> bool:
    """Whether weights are kept in the few bits of the file that they come from."""
    return numerics == FAST and linears == AUTO and model.gguf is not None


def _packer(model: LoadedModel, linears: str, release: bool) -> Packer:
    untyped: Any = model.module
    return Packer(
        kinds=[kind for kind in KINDS if linears in (AUTO, kind.name)],
        quantised=(
            GgufWeights(model.gguf, model.module)
            if model.gguf and packs(model, FAST, linears)
            else None
        ),
        release=release,
        kept=[untyped.get_input_embeddings().weight],
    )


def _fast(model: LoadedModel, packer: Packer, attention: AttentionKind, lean: bool) -> Numerics:
    decoder = LeanDecoder.of(model.module, packer.fuse, attention) if lean else None
    if decoder is None:
        pack_module(model.module, packer)
    for shape, choice in packer.choices.items():
        logs.get(__name__).debug("linear chosen", shape=shape, kind=choice.kind.name)
    return decoder or FastNumerics(attention)


def _shared_experts(config: Any) -> str:
    """Why a mixture of experts can't run many rows at once, or nothing.

    Each expert gets the rows that chose it, so their number depends on the neighbours.
    """
    settings = config.get_text_config().to_dict()
    for name, value in settings.items():
        if "experts" in name and isinstance(value, int) and value > 1:
            return f"rows that choose the same of its {value} experts share a product"
    return ""
