"""Which numerics a model runs with, chosen once at load.

`fast` batches freely. `invariant` gives a row the same bits whatever shares its step, and is
only handed out for a model on which that was seen to hold.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider import logs
from outrider.errors import UnsupportedModelError
from outrider.model import flex
from outrider.model.fast import FastNumerics
from outrider.model.flex import AttentionKind, choose_attention
from outrider.model.gguf import GgufWeights
from outrider.model.invariance import first_dependence
from outrider.model.invariant import InvariantNumerics
from outrider.model.lean import LeanDecoder
from outrider.model.linears.install import (
    Packer,
    QuantisedWeights,
    pack_module,
    require_weights,
)
from outrider.model.linears.kinds import KINDS
from outrider.model.linears.packed import OwnIntegers, QuantisedLinear
from outrider.model.loading import LoadedModel
from outrider.model.paged import Numerics
from outrider.model.parts import parts_of

FAST = "fast"
INVARIANT = "invariant"

# Which linears: what is measured to be quickest, the plain ones, or one kind by its name.
AUTO = "auto"
LINEARS = (AUTO, *(kind.name for kind in KINDS))
# Whose code computes a step: compiled for this processor, a loop over torch's operators, or the
# model's own.
COMPILED = "compiled"
LEAN = "lean"
MODULE = "module"
FORWARDS = (AUTO, COMPILED, LEAN, MODULE)

# 32 rows leave no remainder in vectorised loops, whatever the width.
_PASS_ROWS = 32


def choose_numerics(
    name: str,
    model: LoadedModel,
    *,
    forward: str = AUTO,
    linears: str = AUTO,
    attention: str = flex.SDPA,
    release: bool = True,
) -> Numerics:
    """The numerics of that name; both replace the linears in `model`.

    `forward` is one of `FORWARDS`; a compiled forward is both fast and invariant. Weights are
    laid out anew and, unless told not to `release` them, taken from the module, whose own
    forward can't be used afterwards. `linears` is one of `LINEARS` and `attention` one of
    `flex.ATTENTIONS`, for a forward of torch's operators. Where nothing can be compiled
    `invariant` has linears of its own, and a model that is not invariant in passes of many rows
    runs row by row.

    Raises:
        UnsupportedModelError: the model can't be invariant here; the message says why.
        InternalError: its weights are gone, into a forward that was chosen before.
    """
    require_weights(model.module)
    packer = _packer(model, name, forward, linears, release)
    if (compiled := _compiled(model, packer, name, forward, linears)) is not None:
        return compiled
    if name == FAST:
        kind = choose_attention(attention, model.module.device)
        return _fast(model, packer, kind, lean=forward != MODULE)
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


def packs(gguf: Path | None, numerics: str, forward: str, linears: str, device: str) -> bool:
    """Whether weights are kept in the few bits of the file that they come from, if it is one.

    `device` is a type of devices; there are kernels for CPUs only.
    """
    plain = forward == COMPILED or linears != AUTO or device != "cpu"
    return numerics == FAST and not plain and gguf is not None


def _packer(model: LoadedModel, name: str, forward: str, linears: str, release: bool) -> Packer:
    untyped: Any = model.module
    return Packer(
        kinds=[kind for kind in KINDS if linears in (AUTO, kind.name)],
        quantised=(
            _quantised(model.gguf, model.module)
            if model.gguf and packs(model.gguf, name, forward, linears, model.module.device.type)
            else None
        ),
        release=release,
        kept=[untyped.get_input_embeddings().weight],
    )


def _quantised(gguf: Path, module: torch.nn.Module) -> QuantisedWeights:
    if any(isinstance(child, QuantisedLinear) for child in module.modules()):
        return OwnIntegers()
    return GgufWeights(gguf, module)


def _compiled(
    model: LoadedModel, packer: Packer, name: str, forward: str, linears: str
) -> Numerics | None:
    """The compiled forward if it is wanted and can be had.

    Raises:
        UnsupportedModelError: it was asked for by name and can't be had.
    """
    wanted = forward == COMPILED or (forward == AUTO and linears == AUTO)
    if not wanted or packer.quantised is not None:
        return None
    # Not at the top: the compiler takes long to import, and most processes don't need it.
    from outrider.model.compiled.decoder import CompiledDecoder, linears_of, obstacle

    parts = parts_of(model.module)
    why = "it is not built like Llama" if parts is None else obstacle(parts)
    if parts is not None and not why:
        # Nothing is taken out before it is known that the decoder will do.
        decoder = CompiledDecoder(parts, packer.take_out if name == FAST else _leave)
        if name == INVARIANT:
            why = first_dependence(model, decoder)
        if not why:
            for linear in linears_of(parts):
                packer.take_out(linear)
            return decoder
    if forward == COMPILED:
        raise UnsupportedModelError(
            f"{model.name} can't be served with --forward {COMPILED}: {why}; use --forward {AUTO}"
        )
    return None


def _fast(model: LoadedModel, packer: Packer, attention: AttentionKind, *, lean: bool) -> Numerics:
    parts = parts_of(model.module) if lean else None
    decoder = LeanDecoder(parts, packer.fuse, attention) if parts is not None else None
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


def _leave(linear: torch.nn.Module) -> None:
    """Nothing is done to a layer whose weight was laid out anew."""
