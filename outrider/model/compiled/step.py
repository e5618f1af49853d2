"""The whole forward as one function that every thread of a team runs.

Between two waits each thread does its share: of rows, of heads, or of the columns of a
product. `LAYER` and `STEP` say what the function finds at the addresses it is given.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.compiled import kernels, vectors
from outrider.model.compiled.kernels import FLOAT_BYTES, TILE
from outrider.model.compiled.vectors import call, pointer

_COLUMNS = TILE.columns
_BLOCK = BLOCK_TOKENS
# Most rows that attend together.
TILE_ROW_LIMIT = 8


def _fields(*names: str) -> list[tuple[str, type]]:
    return [(name, np.int64) for name in names]


# A layer: addresses of its weights (0: it has none), its pages and the window (0: none).
LAYER = np.dtype(
    [
        *_fields("attention_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "mlp_norm"),
        *_fields("gate", "up", "down", "pages", "window"),
        ("attention_eps", np.float32),
        ("head_eps", np.float32),
        ("mlp_eps", np.float32),
        ("scaling", np.float32),
    ],
    align=True,
)
# A row: the blocks of its sequence, its position, which is where its KV goes in a chain, the
# index where it does go, and the tokens [0, end) and the path that it sees.
ROW = np.dtype(_fields("blocks", "position", "index", "end", "path", "path_count"))
# Rows [first, first + count) of one sequence that attend together; `reach` is how many tokens
# of it the last of them sees.
TILE_ROWS = np.dtype(_fields("first", "count", "reach"))
STEP = np.dtype(
    [
        # The model.
        *_fields("layers", "layer_count", "hidden", "heads", "kv_heads", "head_size"),
        *_fields("inner", "norm", "head", "vocab"),
        ("norm_eps", np.float32),
        ("unused", np.float32),
        # The step: rows, those whose logits are wanted, and where they go.
        *_fields(
            "rows",
            "row_count",
            "tiles",
            "tile_count",
            "cos",
            "sin",
            "wanted",
            "wanted_count",
            "logits",
        ),
        *_fields("logits_stride"),
        # Room to work in: rows of the residual stream, of their norms, and so on. Each thread
        # has scores [heads of a tile, context] and places [context].
        *_fields("x", "normed", "stride", "qkv", "qkv_stride", "mixed", "gates", "ups"),
        *_fields("inner_stride", "scores", "places", "queries", "room", "sums", "context"),
        # The team.
        *_fields("barrier", "thread_index", "team_size"),
    ],
    align=True,
)


@njit
def _panels(columns):
    return (columns + _COLUMNS - 1) // _COLUMNS


@njit
def _project(x, x_stride, rows, weight, length, columns, out, out_stride, add, me, team):
    """This thread's columns of a product."""
    panels = _panels(columns)
    first, last = panels * me // team, panels * (me + 1) // team
    kernels.multiply(x, x_stride, rows, weight, length, out, out_stride, first, last, add)


@njit
def _normalise_rows(step, rows, weight, eps, me, team):
    for row in range(me, rows, team):
        at = row * step.stride * FLOAT_BYTES
        kernels.normalise(step.x + at, weight, eps, step.hidden, step.normed + at)


@njit
def _place(step, layer, me, team):
    """Turn the queries and keys of this thread's rows, and write keys and values to the pages."""
    size, heads, kv_heads = step.head_size, step.heads, step.kv_heads
    head_bytes = size * FLOAT_BYTES
    rows = carray(pointer(step.rows), step.row_count, ROW)
    for index in range(me, step.row_count, team):
        qkv = step.qkv + index * step.qkv_stride * FLOAT_BYTES
        if layer.qkv_bias != 0:
            kernels.add(layer.qkv_bias, qkv, (heads + 2 * kv_heads) * size)
        turn = index * head_bytes
        for head in range(heads + kv_heads):
            at = qkv + head * head_bytes
            if layer.q_norm != 0:
                norm = layer.q_norm if head < heads else layer.k_norm
                kernels.normalise(at, norm, layer.head_eps, size, at)
            kernels.rotate(at, step.cos + turn, step.sin + turn, size)
        keys = qkv + heads * head_bytes
        page = layer.pages + _block(rows[index].blocks, rows[index].index) * _page_bytes(step)
        token = rows[index].index % _BLOCK
        kernels.keep(keys, keys + kv_heads * head_bytes, page, token, kv_heads, size)


@njit
def _block(blocks, index):
    """The block that holds a token."""
    return carray(pointer(blocks), index // _BLOCK + 1, np.int64)[index // _BLOCK]


@njit
def _page_bytes(step):
    return 2 * _BLOCK * step.kv_heads * step.head_size * FLOAT_BYTES


@njit
def _attend(step, layer, me, team):
    """Attention of this thread's share of all (KV head, tile, row, query head).

    Query heads of rows that share a KV head are computed together, and tile after tile goes
    over the keys and values of one KV head, which then are in the cache.
    """
    kv_heads = step.kv_heads
    group = step.heads // kv_heads
    tiles = carray(pointer(step.tiles), step.tile_count, TILE_ROWS)
    whole = step.row_count * step.heads
    first, last = whole * me // team, whole * (me + 1) // team
    at = 0
    for kv_head in range(kv_heads):
        for number in range(step.tile_count):
            tile = tiles[number]
            members = tile.count * group
            begin, end = max(first - at, 0), min(last - at, members)
            if begin < end:
                _attend_tile(step, layer, tile, kv_head, begin, end, me)
            at += members


@njit
def _attend_tile(step, layer, tile, kv_head, begin, end, me):
    """Attention of the members [begin, end) of a tile at one KV head: row by row, its heads."""
    size, kv_heads, heads = step.head_size, step.kv_heads, step.heads
    group = heads // kv_heads
    rows = carray(pointer(step.rows), step.row_count, ROW)
    blocks = rows[tile.first].blocks
    page_floats = 2 * _BLOCK * kv_heads * size
    stride = step.context
    scores = step.scores + me * (TILE_ROW_LIMIT * group) * stride * FLOAT_BYTES
    queries = step.queries + me * (TILE_ROW_LIMIT * group) * size * FLOAT_BYTES
    places = carray(pointer(step.places + me * stride * 8), tile.reach, np.int64)
    # No row sees what is before the window of the first.
    since = 0
    if layer.window != 0:
        since = max(rows[tile.first].position + 1 - layer.window, 0) // _BLOCK * _BLOCK
    for member in range(begin, end):
        row, head = tile.first + member // group, kv_head * group + member % group
        source = step.qkv + (row * step.qkv_stride + head * size) * FLOAT_BYTES
        kernels.copy(source, queries + (member - begin) * size * FLOAT_BYTES, size)
    for token in range(since, tile.reach, _BLOCK):
        page = _block(blocks, token) * page_floats
        keys = layer.pages + (page + kv_head * size * _BLOCK) * FLOAT_BYTES
        kernels.score(queries, size, end - begin, keys, size, scores + token * FLOAT_BYTES, stride)
        for i in range(min(_BLOCK, tile.reach - token)):
            places[token + i] = page + ((_BLOCK + i) * kv_heads + kv_head) * size
    for member in range(begin, end):
        row = rows[tile.first + member // group]
        seen, path, path_count = 0, row.path, row.path_count
        if layer.window != 0:
            seen = max(row.position + 1 - layer.window, 0)
            # The window may begin inside the path.
            skipped = min(max(seen - row.end, 0), path_count)
            path += skipped * 8
            path_count -= skipped
            seen = min(seen, row.end)
        # The row's tokens are counted from `since` here and below.
        mine = scores + ((member - begin) * stride + since) * FLOAT_BYTES
        kernels.share(
            mine, seen - since, row.end - since, path, path_count, since, layer.scaling,
            tile.reach - since,
        )  # fmt: skip
    mixed = step.room + me * (TILE_ROW_LIMIT * group) * size * FLOAT_BYTES
    kernels.mix(
        layer.pages, step.places + (me * stride + since) * 8, scores + since * FLOAT_BYTES, stride,
        end - begin, tile.reach - since, size, mixed, size, step.sums + me * 64,
    )  # fmt: skip
    for member in range(begin, end):
        row, head = tile.first + member // group, kv_head * group + member % group
        target = step.mixed + (row * heads + head) * size * FLOAT_BYTES
        kernels.copy(mixed + (member - begin) * size * FLOAT_BYTES, target, size)


@njit
def _keep_wanted(step):
    """Move the rows whose logits are wanted to the front, with what attention gave them."""
    wanted = carray(pointer(step.wanted), step.wanted_count, np.int64)
    mixed_size = step.heads * step.head_size
    for to in range(step.wanted_count):
        row = wanted[to]
        # They come in order, so nothing is overwritten that is still to be moved.
        if row != to:
            kernels.copy(
                step.x + row * step.stride * FLOAT_BYTES,
                step.x + to * step.stride * FLOAT_BYTES,
                step.hidden,
            )
            kernels.copy(
                step.mixed + row * mixed_size * FLOAT_BYTES,
                step.mixed + to * mixed_size * FLOAT_BYTES,
                mixed_size,
            )


@njit
def _mlp(step, layer, rows, me, team):
    """This thread's columns of silu(gate) * up."""
    panels = _panels(step.inner)
    first, last = panels * me // team, panels * (me + 1) // team
    stride = step.inner_stride
    for panel in range(first, last):
        for weight, out in ((layer.gate, step.gates), (layer.up, step.ups)):
            kernels.multiply(
                step.normed, step.stride, rows, weight, step.hidden, out, stride,
                panel, panel + 1, 0,
            )  # fmt: skip
        for row in range(rows):
            at = (row * stride + panel * _COLUMNS) * FLOAT_BYTES
            kernels.gate(step.gates + at, step.ups + at, _COLUMNS)


@njit
def run(step, me, team):
    """One thread's part of the forward."""
    hidden, mixed_size = step.hidden, step.heads * step.head_size
    qkv_columns = (step.heads + 2 * step.kv_heads) * step.head_size
    layers = carray(pointer(step.layers), step.layer_count, LAYER)
    rows = step.row_count
    for number in range(step.layer_count):
        layer = layers[number]
        _normalise_rows(step, rows, layer.attention_norm, layer.attention_eps, me, team)
        call(step.barrier)
        _project(
            step.normed, step.stride, rows, layer.qkv, hidden, qkv_columns,
            step.qkv, step.qkv_stride, 0, me, team,
        )  # fmt: skip
        call(step.barrier)
        _place(step, layer, me, team)
        call(step.barrier)
        _attend(step, layer, me, team)
        call(step.barrier)
        if number == step.layer_count - 1:
            rows = step.wanted_count
            if me == 0:
                _keep_wanted(step)
            call(step.barrier)
        _project(
            step.mixed, mixed_size, rows, layer.out, mixed_size, hidden,
            step.x, step.stride, 1, me, team,
        )  # fmt: skip
        call(step.barrier)
        _normalise_rows(step, rows, layer.mlp_norm, layer.mlp_eps, me, team)
        call(step.barrier)
        _mlp(step, layer, rows, me, team)
        call(step.barrier)
        _project(
            step.gates, step.inner_stride, rows, layer.down, step.inner, hidden,
            step.x, step.stride, 1, me, team,
        )  # fmt: skip
        call(step.barrier)
    _normalise_rows(step, rows, step.norm, step.norm_eps, me, team)
    call(step.barrier)
    _project(
        step.normed, step.stride, rows, step.head, hidden, step.vocab,
        step.logits, step.logits_stride, 0, me, team,
    )  # fmt: skip


def compile_step() -> Any:
    """`run` as a C function of the address of a STEP, to be called by each thread of a team.

    Takes some ten seconds the first time, on each kind of processor; the result is kept beside
    this file, or in the user's cache. `address` of what is returned is the function's.
    """
    # A kept result is looked up by this file and by what the function below refers to.
    sources = _digest()

    def run_in_team(address):
        _ = sources
        step = carray(address, 1, STEP)[0]
        run(step, call(step.thread_index), call(step.team_size))

    signature = types.void(types.voidptr)
    try:
        return cfunc(signature, cache=True)(run_in_team)
    except RuntimeError:  # there is no place to keep it
        return cfunc(signature)(run_in_team)


def _digest() -> str:
    files = (kernels.__file__, vectors.__file__)
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
