"""A model whose steps run as compiled code; a `Numerics`."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch.autograd.profiler import record_function
from transformers import PreTrainedModel

from outrider.errors import UnsupportedModelError
from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.compiled import pack, step
from outrider.model.compiled.rows import StepTable
from outrider.model.compiled.team import Team
from outrider.model.compiled.vectors import LANES
from outrider.model.pages import KvPages
from outrider.model.parts import Decoder, Layer
from outrider.model.rows import StepOutput, StepRows

# What becomes of a layer whose weight is laid out anew.
TakeOut = Callable[[torch.nn.Module], None]
_NO_TEAM = "torch has no OpenMP runtime that is known"


class CompiledDecoder:
    """A decoder over packed weights.

    Shapes: N rows, H query heads, Hkv heads of keys and values, of size D.
    """

    arithmetic: ClassVar[str] = "compiled"
    keys_by_block: ClassVar[bool] = True

    def __init__(self, parts: Decoder, take_out: TakeOut) -> None:
        """`take_out` is called for each linear layer once its weight is laid out anew.

        Raises:
            UnsupportedModelError: there is an `obstacle`.
        """
        team, why = Team.of_torch(), obstacle(parts)
        if team is None or why:
            raise UnsupportedModelError(f"no compiled forward: {why}")
        self._parts = parts
        self._team = team
        self._function = step.compile_step()
        self._kept: list[torch.Tensor] = []
        self._head_size = parts.layers[0].q.out_features // parts.heads
        self._hidden = parts.embed.weight.shape[1]
        self._vocab, self._inner = parts.head.out_features, parts.layers[0].gate.out_features
        self._layers = np.zeros(len(parts.layers), step.LAYER)
        for record, layer in zip(self._layers, parts.layers, strict=True):
            self._fill(record, layer, take_out)
        self._step = np.zeros(1, step.STEP)
        self._step_address = self._step.ctypes.data
        self._describe_model(take_out)
        self._capacity = self._threads = 0
        self._room: dict[str, torch.Tensor] = {}
        self._pages: KvPages | None = None

    def run(
        self,
        module: PreTrainedModel,
        pages: KvPages,
        rows: StepRows,
        inputs: torch.Tensor | None = None,
    ) -> StepOutput:
        """Run the step; see `Numerics`."""
        count, wanted = len(rows.token_ids), len(rows.wanted)
        table = StepTable.of(rows)
        self._make_room(count, max(span.context for span in rows.spans))
        self._use(pages)
        ids, positions = torch.tensor([rows.token_ids, rows.positions]).unbind(0)
        x = self._parts.embed(ids) if inputs is None else inputs
        self._room["x"][:count, : self._hidden] = x
        cos, sin = (
            part[0].contiguous()
            for part in self._parts.rotary(self._parts.embed.weight, positions[None])
        )
        logits = torch.empty(max(wanted, 1), pack.padded(self._vocab))
        record = self._step[0]
        record["rows"], record["row_count"] = table.rows.ctypes.data, count
        record["tiles"], record["tile_count"] = table.tiles.ctypes.data, len(table.tiles)
        record["wanted"], record["wanted_count"] = table.wanted.ctypes.data, wanted
        record["cos"], record["sin"] = cos.data_ptr(), sin.data_ptr()
        record["logits"], record["logits_stride"] = logits.data_ptr(), logits.shape[1]
        with record_function("outrider::compiled_step"):
            self._team.run(self._function.address, self._step_address)
        hidden = self._room["normed"][:wanted, : self._hidden]
        return StepOutput(logits[:wanted, : self._vocab], hidden)

    def _fill(self, record: Any, layer: Layer, take_out: TakeOut) -> None:
        weights = {
            "qkv": [layer.q, layer.k, layer.v],
            "out": [layer.out],
            "gate": [layer.gate],
            "up": [layer.up],
            "down": [layer.down],
        }
        for name, linears in weights.items():
            record[name] = self._pack(linears, take_out)
        if layer.q.bias is not None:
            record["qkv_bias"] = self._keep(
                torch.cat([linear.bias for linear in (layer.q, layer.k, layer.v)])
            )
        norms = {"attention_norm": layer.attention_norm, "mlp_norm": layer.mlp_norm}
        if layer.head_norms is not None:
            norms["q_norm"], norms["k_norm"] = layer.head_norms
            record["head_eps"] = layer.head_norms[0].eps
        for name, norm in norms.items():
            record[name] = self._keep(norm.weight)
        record["attention_eps"], record["mlp_eps"] = layer.attention_norm.eps, layer.mlp_norm.eps
        record["scaling"], record["window"] = layer.scaling, layer.window or 0

    def _describe_model(self, take_out: TakeOut) -> None:
        parts, record = self._parts, self._step[0]
        record["layers"], record["layer_count"] = self._layers.ctypes.data, len(self._layers)
        record["hidden"], record["inner"] = self._hidden, self._inner
        record["heads"], record["kv_heads"] = parts.heads, parts.kv_heads
        record["head_size"], record["vocab"] = self._head_size, self._vocab
        record["norm"], record["norm_eps"] = self._keep(parts.norm.weight), parts.norm.eps
        record["head"] = self._pack([parts.head], take_out)
        for name in ("barrier", "thread_index", "team_size"):
            record[name] = getattr(self._team, name)

    def _pack(self, linears: list[torch.nn.Linear], take_out: TakeOut) -> int:
        packed = pack.panels([linear.weight.detach() for linear in linears])
        for linear in linears:
            take_out(linear)
        return self._keep(packed)

    def _keep(self, tensor: torch.Tensor) -> int:
        """The address of a tensor that lives as long as the decoder."""
        tensor = tensor.detach().contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _use(self, pages: KvPages) -> None:
        if pages is not self._pages:
            self._pages = pages
            self._layers["pages"] = [rows.data_ptr() for rows in pages.rows]

    def _make_room(self, rows: int, context: int) -> None:
        """Buffers for at least so many rows and tokens of context; they only ever grow."""
        record, parts = self._step[0], self._parts
        if rows > self._capacity:
            self._capacity = max(rows, 2 * self._capacity)
            qkv = pack.padded((parts.heads + 2 * parts.kv_heads) * self._head_size)
            stride, inner = pack.padded(self._hidden), pack.padded(self._inner)
            widths = {
                "x": stride, "normed": stride, "qkv": qkv, "gates": inner, "ups": inner,
                "mixed": parts.heads * self._head_size,
            }  # fmt: skip
            for name, width in widths.items():
                self._room[name] = torch.zeros(self._capacity, width)
                record[name] = self._room[name].data_ptr()
            record["stride"], record["qkv_stride"], record["inner_stride"] = stride, qkv, inner
        # Scores are computed for whole blocks.
        context = -(-context // BLOCK_TOKENS) * BLOCK_TOKENS
        threads = torch.get_num_threads()
        room = int(record["context"])
        if context > room or threads > self._threads:
            self._threads = max(threads, self._threads)
            context = room if context <= room else max(context, 2 * room)
            members = step.TILE_ROW_LIMIT * parts.heads // parts.kv_heads
            rooms = {
                "scores": torch.zeros(self._threads, members, context),
                "places": torch.zeros(self._threads, context, dtype=torch.int64),
                "queries": torch.zeros(self._threads, members, self._head_size),
                "room": torch.zeros(self._threads, members, self._head_size),
                "sums": torch.zeros(self._threads, 16),
            }
            self._room.update(rooms)
            for name, tensor in rooms.items():
                record[name] = tensor.data_ptr()
            record["context"] = context


def obstacle(parts: Decoder) -> str:
    """Why a model's parts can't be compiled, or nothing."""
    if Team.of_torch() is None:
        return _NO_TEAM
    if parts.total is not None:
        return "it is split over several ranks"
    if not all(pack.fits(linear.weight) for linear in linears_of(parts)):
        return "it takes float32 weights on a CPU, with rows of a multiple of four numbers"
    plain = [x for layer in parts.layers for x in (layer.out, layer.gate, layer.up, layer.down)]
    if any(linear.bias is not None for linear in (*plain, parts.head)):
        return "only queries, keys and values may have a bias"
    first = parts.layers[0]
    if first.q.out_features // parts.heads != first.v.out_features // parts.kv_heads:
        return "heads of queries and values differ in size"
    if first.q.out_features // parts.heads % LANES:
        return f"the size of a head is no multiple of {LANES}"
    return ""


def linears_of(parts: Decoder) -> list[torch.nn.Linear]:
    """Every linear layer of a decoder."""
    found = [parts.head]
    for layer in parts.layers:
        found += [layer.q, layer.k, layer.v, layer.out, layer.gate, layer.up, layer.down]
    return found
