"""A whole proposal of a draft network as one function of one thread, for many sessions at once.

    feed     the rows that a session is behind, then, level by level,
    choose   the best tokens of each session's logits and how likely each is,
    follow   the best of them: it is the next row, with the state that the head made it of

until a session's draft is as long as was asked for, or unlikely to be reached any further. The
weights are bytes (`quantised`), and what is drafted is a hint: nothing here has to be exact.
`DRAFT`, `DRAFT_LAYER` and `TURN` say what the function finds at the addresses it is given.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from outrider.model.compiled import kernels, quantised, step, vectors
from outrider.model.compiled.kernels import FLOAT_BYTES
from outrider.model.compiled.quantised import COLUMNS
from outrider.model.compiled.step import ROW, TILE_ROW_LIMIT, TILE_ROWS, _attend, _place
from outrider.model.compiled.vectors import pointer
from outrider.sampling import noise

_p1, _p2, _p3, _p4 = (quantised.make_product(rows) for rows in range(1, 5))
# Tokens of a level whose chances are told.
WIDTH = 4
_LINEARS = ("qkv", "out", "gate", "up", "down")
# Tokens that fall behind the best by so much, in logits over the temperature, are not drawn.
_HOPELESS = np.float32(11.0)
_GAMMA, _MIX_1, _MIX_2 = np.uint64(noise.GAMMA), np.uint64(noise.MIX_1), np.uint64(noise.MIX_2)
_F = np.float32


def _fields(*names: str) -> list[tuple[str, type]]:
    return [(name, np.int64) for name in names]


# A layer: as `step.LAYER`, with the scales of each weight.
DRAFT_LAYER = np.dtype(
    [
        *_fields(*_LINEARS, *(f"{name}_scales" for name in _LINEARS)),
        *_fields("attention_norm", "qkv_bias", "q_norm", "k_norm", "mlp_norm", "pages", "window"),
        ("attention_eps", np.float32),
        ("head_eps", np.float32),
        ("mlp_eps", np.float32),
        ("scaling", np.float32),
    ],
    align=True,
)
# What is drafted for one session: `rows` rows that it is behind, which begin at `first_row` and
# of which the first sits at position `start`; its `levels`, up to `most_levels`, are answered.
# A level is drafted while the ones before it are reached with the chance `worth` or more,
# chances being multiplied by `trust`. `noise` is the key of the session's noise before positions
# come into it. The state of the last token is kept at `state`.
TURN = np.dtype(
    [
        *_fields("blocks", "start", "first_row", "rows", "most_levels", "levels"),
        ("noise", np.uint64),
        ("temperature", np.float32),
        ("worth", np.float32),
        ("trust", np.float32),
        ("reached", np.float32),
    ],
    align=True,
)
DRAFT = np.dtype(
    [
        # The network. Embeddings are bfloat16; without `fuse` they are its input.
        *_fields("layers", "layer_count", "hidden", "heads", "kv_heads", "head_size", "inner"),
        *_fields("embeddings", "fuse", "fuse_scales", "token_norm", "hidden_norm", "missing"),
        *_fields("norm", "head", "head_scales", "columns", "padded_columns", "head_ids"),
        *_fields("cos_table", "sin_table"),
        ("norm_eps", np.float32),
        ("fuse_eps", np.float32),
        # The call. `row_states` are, by row, places in `states`, or -1.
        *_fields("turns", "turn_count", "fed_rows", "token_ids", "row_states", "states"),
        # By turn and level: tokens and chances [turns, max_levels, WIDTH].
        *_fields("max_levels", "found", "chances"),
        # Room to work in, as in `step.STEP`.
        *_fields("row_count", "rows", "tiles", "tile_count", "cos", "sin"),
        *_fields("wanted", "wanted_count", "active", "own_states", "logits", "both"),
        *_fields("x", "normed", "stride", "qkv", "qkv_stride", "mixed", "gates", "ups"),
        *_fields("inner_stride", "scores", "places", "queries", "room", "sums", "context"),
    ],
    align=True,
)


@njit(error_model="numpy")
def _hash(x):
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


@njit(error_model="numpy")
def _gumbel(key, token):
    x = _hash(key + _GAMMA * (np.uint64(token) + np.uint64(1)))
    u = min((np.float64(x >> np.uint64(11)) + 0.5) * 1.1102230246251565e-16, 0.9999999999999999)
    return _F(-np.log(-np.log(u)))


@njit(error_model="numpy")
def _embed(draft, token, target):
    bits = carray(pointer(draft.embeddings + token * draft.hidden * 2), draft.hidden, np.uint16)
    out = carray(pointer(target), draft.hidden, np.uint32)
    for i in range(draft.hidden):
        out[i] = np.uint32(bits[i]) << np.uint32(16)


@njit(error_model="numpy")
def _input(draft, row, token, state):
    """The first layer's input of a row, as far as one row goes: what `fuse` multiplies."""
    size = draft.hidden
    if draft.fuse == 0:
        _embed(draft, token, draft.x + row * draft.stride * FLOAT_BYTES)
        return
    both = draft.both + row * 2 * size * FLOAT_BYTES
    _embed(draft, token, both)
    kernels.normalise(both, draft.token_norm, draft.fuse_eps, size, both)
    source = state if state != 0 else draft.missing
    kernels.normalise(source, draft.hidden_norm, draft.fuse_eps, size, both + size * FLOAT_BYTES)


@njit(error_model="numpy")
def _product(x, x_stride, rows, weight, scales, length, columns, out, out_stride, add):
    """Rows x [rows, length] times a weight, into `out`, or with `add` to what is there."""
    for panel in range((columns + COLUMNS - 1) // COLUMNS):
        weights = weight + panel * length * COLUMNS
        factors = scales + panel * COLUMNS * FLOAT_BYTES
        row = 0
        while row < rows:
            count = min(rows - row, 4)
            a = x + row * x_stride * FLOAT_BYTES
            b = out + (row * out_stride + panel * COLUMNS) * FLOAT_BYTES
            if count == 1:
                _p1(a, x_stride, weights, factors, length, b, out_stride, add)
            elif count == 2:
                _p2(a, x_stride, weights, factors, length, b, out_stride, add)
            elif count == 3:
                _p3(a, x_stride, weights, factors, length, b, out_stride, add)
            else:
                _p4(a, x_stride, weights, factors, length, b, out_stride, add)
            row += count


@njit(error_model="numpy")
def _normalise_rows(draft, rows, weight, eps):
    for row in range(rows):
        at = row * draft.stride * FLOAT_BYTES
        kernels.normalise(draft.x + at, weight, eps, draft.hidden, draft.normed + at)


@njit(error_model="numpy")
def _tile_rows(draft, last):
    """Which rows attend together; in the last layer only those whose logits are wanted do."""
    rows = carray(pointer(draft.rows), draft.row_count, ROW)
    tiles = carray(pointer(draft.tiles), draft.row_count, TILE_ROWS)
    count = 0
    if last:
        wanted = carray(pointer(draft.wanted), draft.wanted_count, np.int64)
        for i in range(draft.wanted_count):
            tiles[i].first, tiles[i].count = wanted[i], 1
            tiles[i].reach = rows[wanted[i]].end
        return draft.wanted_count
    row = 0
    while row < draft.row_count:
        size = 1
        while (
            size < TILE_ROW_LIMIT
            and row + size < draft.row_count
            and rows[row + size].blocks == rows[row].blocks
        ):
            size += 1
        tiles[count].first, tiles[count].count = row, size
        tiles[count].reach = rows[row + size - 1].end
        count += 1
        row += size
    return count


@njit(error_model="numpy")
def _keep_wanted(draft):
    wanted = carray(pointer(draft.wanted), draft.wanted_count, np.int64)
    mixed_size = draft.heads * draft.head_size
    for to in range(draft.wanted_count):
        row = wanted[to]
        if row != to:
            kernels.copy(
                draft.x + row * draft.stride * FLOAT_BYTES,
                draft.x + to * draft.stride * FLOAT_BYTES,
                draft.hidden,
            )
            kernels.copy(
                draft.mixed + row * mixed_size * FLOAT_BYTES,
                draft.mixed + to * mixed_size * FLOAT_BYTES,
                mixed_size,
            )


@njit(error_model="numpy")
def _forward(draft):
    """From the rows' inputs to the states and logits of the wanted ones."""
    hidden, mixed_size = draft.hidden, draft.heads * draft.head_size
    qkv_columns = (draft.heads + 2 * draft.kv_heads) * draft.head_size
    stride, inner_stride = draft.stride, draft.inner_stride
    count = draft.row_count
    rows = carray(pointer(draft.rows), count, ROW)
    head_bytes = draft.head_size * FLOAT_BYTES
    if draft.fuse != 0:
        _product(
            draft.both, 2 * hidden, count, draft.fuse, draft.fuse_scales, 2 * hidden, hidden,
            draft.x, stride, 0,
        )  # fmt: skip
    for row in range(count):
        table = rows[row].position * head_bytes
        kernels.copy(draft.cos_table + table, draft.cos + row * head_bytes, draft.head_size)
        kernels.copy(draft.sin_table + table, draft.sin + row * head_bytes, draft.head_size)
    layers = carray(pointer(draft.layers), draft.layer_count, DRAFT_LAYER)
    for number in range(draft.layer_count):
        layer = layers[number]
        last = number == draft.layer_count - 1
        _normalise_rows(draft, count, layer.attention_norm, layer.attention_eps)
        _product(
            draft.normed, stride, count, layer.qkv, layer.qkv_scales, hidden, qkv_columns,
            draft.qkv, draft.qkv_stride, 0,
        )  # fmt: skip
        _place(draft, layer, 0, 1)
        if last and draft.wanted_count == 0:
            return
        draft.tile_count = _tile_rows(draft, last)
        _attend(draft, layer, 0, 1)
        if last:
            _keep_wanted(draft)
            count = draft.wanted_count
        _product(
            draft.mixed, mixed_size, count, layer.out, layer.out_scales, mixed_size, hidden,
            draft.x, stride, 1,
        )  # fmt: skip
        _normalise_rows(draft, count, layer.mlp_norm, layer.mlp_eps)
        for weight, scales, out in (
            (layer.gate, layer.gate_scales, draft.gates),
            (layer.up, layer.up_scales, draft.ups),
        ):
            _product(
                draft.normed, stride, count, weight, scales, hidden, draft.inner,
                out, inner_stride, 0,
            )  # fmt: skip
        for row in range(count):
            at = row * inner_stride * FLOAT_BYTES
            kernels.gate(draft.gates + at, draft.ups + at, draft.inner)
        _product(
            draft.gates, inner_stride, count, layer.down, layer.down_scales, draft.inner, hidden,
            draft.x, stride, 1,
        )  # fmt: skip
    _normalise_rows(draft, count, draft.norm, draft.norm_eps)
    _product(
        draft.normed, stride, count, draft.head, draft.head_scales, hidden, draft.columns,
        draft.logits, draft.padded_columns, 0,
    )  # fmt: skip


@njit(error_model="numpy")
def _perturb(draft, logits, turn, position):
    """Logits over the temperature, with the noise that the target's tokens have there."""
    scale = _F(1.0) / turn.temperature
    bar = vectors.largest(logits, draft.columns) * scale - _HOPELESS
    scores = carray(pointer(logits), draft.columns, _F)
    key = _hash(turn.noise ^ np.uint64(position))
    key = _hash(key)
    for i in range(draft.columns):
        score = scores[i] * scale
        if score < bar:
            scores[i] = _F(-np.inf)
            continue
        token = i
        if draft.head_ids != 0:
            token = carray(pointer(draft.head_ids), draft.columns, np.int64)[i]
        scores[i] = score + _gumbel(key, token)


@njit(error_model="numpy")
def _choose(draft, number, turn, row, position):
    """Note the level's best tokens and their chances; the best token."""
    logits = draft.logits + row * draft.padded_columns * FLOAT_BYTES
    if turn.temperature > 0:
        _perturb(draft, logits, turn, position)
    scores = carray(pointer(logits), draft.columns, _F)
    at = (number * draft.max_levels + turn.levels) * WIDTH
    found = carray(pointer(draft.found + at * 8), WIDTH, np.int64)
    chances = carray(pointer(draft.chances + at * FLOAT_BYTES), WIDTH, _F)
    for i in range(WIDTH):
        found[i], chances[i] = 0, _F(-np.inf)
    for i in range(draft.columns):
        score = scores[i]
        if score > chances[WIDTH - 1]:
            place = WIDTH - 1
            while place > 0 and score > chances[place - 1]:
                found[place], chances[place] = found[place - 1], chances[place - 1]
                place -= 1
            found[place], chances[place] = i, score
    most = chances[0]
    total = _F(0.0)
    for i in range(draft.columns):
        total += kernels.exp(scores[i] - most)
    for i in range(WIDTH):
        chances[i] = kernels.exp(chances[i] - most) / total
        if draft.head_ids != 0:
            found[i] = carray(pointer(draft.head_ids), draft.columns, np.int64)[found[i]]
    turn.levels += 1
    turn.reached *= min(chances[0] * turn.trust, _F(1.0))
    return found[0]


@njit(error_model="numpy")
def run(draft):
    """Feed what is behind and draft level by level."""
    turns = carray(pointer(draft.turns), draft.turn_count, TURN)
    capacity = max(draft.fed_rows, draft.turn_count)
    rows = carray(pointer(draft.rows), capacity, ROW)
    token_ids = carray(pointer(draft.token_ids), draft.fed_rows, np.int64)
    row_states = carray(pointer(draft.row_states), draft.fed_rows, np.int64)
    wanted = carray(pointer(draft.wanted), draft.turn_count, np.int64)
    active = carray(pointer(draft.active), draft.turn_count, np.int64)
    size_bytes = draft.hidden * FLOAT_BYTES
    draft.row_count, count = draft.fed_rows, 0
    for number in range(draft.turn_count):
        turn = turns[number]
        for i in range(turn.rows):
            row = turn.first_row + i
            rows[row].blocks, rows[row].path, rows[row].path_count = turn.blocks, 0, 0
            rows[row].position = rows[row].index = turn.start + i
            rows[row].end = turn.start + i + 1
            state = row_states[row]
            _input(
                draft, row, token_ids[row], draft.states + state * size_bytes if state >= 0 else 0
            )
        if turn.most_levels > 0:
            wanted[count], active[count] = turn.first_row + turn.rows - 1, number
            count += 1
    while True:
        draft.wanted_count = count
        _forward(draft)
        # Where states are written is not where they are read from.
        for i in range(count):
            kernels.copy(
                draft.normed + i * draft.stride * FLOAT_BYTES,
                draft.own_states + i * size_bytes,
                draft.hidden,
            )
        going_on = 0
        for i in range(count):
            number = active[i]
            turn = turns[number]
            position = turn.start + turn.rows + turn.levels
            token = _choose(draft, number, turn, i, position)
            if turn.levels == turn.most_levels or turn.reached < turn.worth:
                continue
            row = going_on
            rows[row].blocks, rows[row].path, rows[row].path_count = turn.blocks, 0, 0
            rows[row].position = rows[row].index = position
            rows[row].end = position + 1
            _input(draft, row, token, draft.own_states + i * size_bytes)
            wanted[row], active[row] = row, number
            going_on += 1
        if going_on == 0:
            return
        draft.row_count = count = going_on


def compile_draft() -> Any:
    """`run` as a C function of the address of a DRAFT; see `step.compile_step`."""
    sources = _digest()

    def run_draft(address):
        _ = sources
        run(carray(address, 1, DRAFT)[0])

    signature = types.void(types.voidptr)
    try:
        return cfunc(signature, cache=True)(run_draft)
    except RuntimeError:  # there is no place to keep it
        return cfunc(signature)(run_draft)


def _digest() -> str:
    files = (kernels.__file__, vectors.__file__, quantised.__file__, step.__file__)
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
