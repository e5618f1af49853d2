"""A draft network whose whole proposals run as compiled code, over pages that others write too."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch

from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.chains import ChainTurn, Levels
from outrider.model.compiled import decoder, draft_step, quantised, step
from outrider.model.compiled.draft_step import DRAFT, DRAFT_LAYER, TURN, WIDTH
from outrider.model.compiled.step import ROW, TILE_ROWS
from outrider.model.draft_network import DraftNetwork
from outrider.model.pages import KvPages
from outrider.model.parts import Decoder, parts_of
from outrider.sampling import noise

_FLOAT_BYTES = 4


class DraftChains:
    """The network's weights as bytes, and room to work in; `Chains` once it has pages.

    One thread uses it at a time.
    """

    def __init__(self, network: DraftNetwork, parts: Decoder, token_count: int) -> None:
        """Ids from `token_count` on are never proposed."""
        self._function = draft_step.compile_draft()
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._function.address)
        self._kept: list[torch.Tensor] = []
        self._parts = parts
        self._hidden = parts.head.in_features
        self._head_size = parts.layers[0].q.out_features // parts.heads
        self._inner = parts.layers[0].gate.out_features
        self._layers = np.zeros(len(parts.layers), DRAFT_LAYER)
        self._draft = np.zeros(1, DRAFT)
        self._room: dict[str, torch.Tensor] = {}
        self._rows = self._turns = self._levels = self._context = 0
        self._pages: KvPages | None = None
        ids = network.head_ids
        self._describe(network, token_count if ids is None else int((ids < token_count).sum()))

    @classmethod
    def of(cls, network: DraftNetwork, token_count: int) -> Self | None:
        """That of a network, before its weights are laid out anew; None where it can't be."""
        parts = parts_of(network.model.module)
        if parts is None or decoder.obstacle(parts):
            return None
        lengths = {weight.shape[1] for weight in _linears(parts)}
        return None if any(length % 4 for length in lengths) else cls(network, parts, token_count)

    def use(self, pages: KvPages) -> None:
        """Keep KV there; keys lie by block."""
        self._pages = pages
        self._layers["pages"] = [rows.data_ptr() for rows in pages.rows]

    @torch.inference_mode()
    def draft(self, turns: Sequence[ChainTurn]) -> list[Levels]:
        """Feed and draft for all turns; see `Chains`."""
        if not turns:
            return []
        fed = sum(len(turn.token_ids) for turn in turns)
        levels = max(turn.levels for turn in turns)
        context = max(t.table.kv_len + len(t.token_ids) + t.levels for t in turns)
        self._make_room(max(fed, len(turns)), len(turns), max(levels, 1), context)
        record = np.zeros(len(turns), TURN)
        blocks = [np.array(turn.table.blocks, dtype=np.int64) for turn in turns]
        token_ids = np.empty(fed, dtype=np.int64)
        row_states = np.full(fed, -1, dtype=np.int64)
        states: list[torch.Tensor] = []
        first = 0
        for number, turn in enumerate(turns):
            rows = len(turn.token_ids)
            token_ids[first : first + rows] = turn.token_ids
            for row, state in turn.states.items():
                row_states[first + row] = len(states)
                states.append(state)
            record[number] = (
                blocks[number].ctypes.data, turn.table.kv_len, first, rows, turn.levels, 0,
                noise.seeded(turn.seed), turn.temperature, turn.worth, turn.trust, 1.0,
            )  # fmt: skip
            first += rows
        known = torch.stack(states) if states else torch.empty(0)
        draft = self._draft[0]
        draft["turns"], draft["turn_count"] = record.ctypes.data, len(turns)
        draft["token_ids"], draft["fed_rows"] = token_ids.ctypes.data, fed
        draft["row_states"], draft["states"] = row_states.ctypes.data, known.data_ptr()
        self._run(self._draft.ctypes.data)
        found = self._room["found"].view(-1, self._levels, WIDTH)[: len(turns)].tolist()
        chances = self._room["chances"].view(-1, self._levels, WIDTH)[: len(turns)].tolist()
        counts = record["levels"].tolist()
        return [Levels(found[i][:count], chances[i][:count]) for i, count in enumerate(counts)]

    # --- what it works with ---------------------------------------------------------------

    def _describe(self, network: DraftNetwork, columns: int) -> None:
        """Lay the weights out; the first `columns` of the head may be proposed."""
        parts, draft = self._parts, self._draft[0]
        for record, layer in zip(self._layers, parts.layers, strict=True):
            weights = {
                "qkv": [layer.q, layer.k, layer.v],
                "out": [layer.out],
                "gate": [layer.gate],
                "up": [layer.up],
                "down": [layer.down],
            }
            for name, linears in weights.items():
                self._keep_product(record, name, [linear.weight for linear in linears])
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
            record["attention_eps"] = layer.attention_norm.eps
            record["mlp_eps"] = layer.mlp_norm.eps
            record["scaling"], record["window"] = layer.scaling, layer.window or 0
        draft["layers"], draft["layer_count"] = self._layers.ctypes.data, len(self._layers)
        draft["hidden"], draft["inner"] = self._hidden, self._inner
        draft["heads"], draft["kv_heads"] = parts.heads, parts.kv_heads
        draft["head_size"] = self._head_size
        draft["embeddings"] = self._keep(network.embeddings.to(torch.bfloat16))
        draft["norm"], draft["norm_eps"] = self._keep(parts.norm.weight), parts.norm.eps
        self._keep_product(draft, "head", [parts.head.weight])
        draft["columns"] = columns
        draft["padded_columns"] = quantised.padded(parts.head.out_features)
        if network.head_ids is not None:
            draft["head_ids"] = self._keep(network.head_ids)
        if (fuse := network.fuse) is not None:
            self._keep_product(draft, "fuse", [fuse.weight])
            draft["token_norm"] = self._keep(fuse.token_norm)
            draft["hidden_norm"] = self._keep(fuse.hidden_norm)
            draft["missing"], draft["fuse_eps"] = self._keep(fuse.missing), fuse.eps

    def _keep_product(self, record: Any, name: str, weights: Sequence[torch.Tensor]) -> None:
        packed, scales = quantised.panels(weights)
        record[name], record[f"{name}_scales"] = self._keep(packed), self._keep(scales)

    def _keep(self, tensor: torch.Tensor) -> int:
        """The address of a tensor that lives as long as this."""
        tensor = tensor.detach().contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _make_room(self, rows: int, turns: int, levels: int, context: int) -> None:
        """Buffers for at least so many; they only ever grow."""
        parts, padded = self._parts, quantised.padded
        if rows > self._rows:
            self._rows = max(rows, 2 * self._rows)
            qkv = padded((parts.heads + 2 * parts.kv_heads) * self._head_size)
            stride, inner = padded(self._hidden), padded(self._inner)
            self._take(
                {
                    "x": (stride,), "normed": (stride,), "qkv": (qkv,), "gates": (inner,),
                    "ups": (inner,), "both": (2 * self._hidden,),
                    "mixed": (parts.heads * self._head_size,),
                    "cos": (self._head_size,), "sin": (self._head_size,),
                },
                self._rows,
            )  # fmt: skip
            for name, kind in (("rows", ROW), ("tiles", TILE_ROWS)):
                self._take_bytes(name, self._rows * kind.itemsize)
            draft = self._draft[0]
            draft["stride"], draft["qkv_stride"], draft["inner_stride"] = stride, qkv, inner
        if turns > self._turns or levels > self._levels:
            self._turns, self._levels = max(turns, self._turns), max(levels, self._levels)
            columns = quantised.padded(parts.head.out_features)
            self._take({"own_states": (self._hidden,), "logits": (columns,)}, self._turns)
            for name in ("wanted", "active"):
                self._take_bytes(name, self._turns * 8)
            shape = (self._levels, WIDTH)
            self._take({"chances": shape}, self._turns)
            self._take({"found": shape}, self._turns, torch.int64)
            self._draft["max_levels"] = self._levels
        if context > self._context:
            context = -(-max(context, 2 * self._context) // BLOCK_TOKENS) * BLOCK_TOKENS
            self._context = context
            members = step.TILE_ROW_LIMIT * parts.heads // parts.kv_heads
            size = self._head_size
            self._take({"scores": (context,), "queries": (size,), "room": (size,)}, members)
            self._take({"places": (context,)}, 1, torch.int64)
            self._take({"sums": (16,)}, 1)
            self._draft["context"] = context
            # [1, context, size]; its input says only which type and device.
            cos, sin = parts.rotary(parts.norm.weight, torch.arange(context)[None])
            for name, table in (("cos_table", cos), ("sin_table", sin)):
                self._room[name] = table[0].float().contiguous()
                self._draft[name] = self._room[name].data_ptr()

    def _take(
        self, shapes: Mapping[str, tuple[int, ...]], count: int, dtype: torch.dtype = torch.float32
    ) -> None:
        for name, shape in shapes.items():
            self._room[name] = torch.zeros(count, *shape, dtype=dtype)
            self._draft[name] = self._room[name].data_ptr()

    def _take_bytes(self, name: str, size: int) -> None:
        self._take({name: (-(-size // 8),)}, 1, torch.int64)


def _linears(parts: Decoder) -> list[torch.Tensor]:
    return [linear.weight for linear in decoder.linears_of(parts)]
