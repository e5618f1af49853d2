"""Building blocks of compiled code whose order of additions is written down.

A compiler that may reorder the additions of a sum makes its bits depend on the processor. Here
a sum has `LANES` partial sums, added up in a fixed way; processors with narrower vectors
compute the lanes in several instructions and come to the same bits. Products are always fused
with the addition that follows.

Pointers are plain integers (addresses in bytes) in the code that calls these.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
# A product goes through this many columns of its sum at once; every row has a multiple of it.
UNROLL = 4
# How far ahead weights are fetched, in steps of the sum. Memory is slower than arithmetic here,
# and the processor's own guess ends at the end of each page.
AHEAD = 64

_FLOAT = ir.FloatType()
_INT32 = ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)


@dataclass(frozen=True, slots=True)
class Tile:
    """How much of a product is kept in registers: so many rows, and vectors of columns.

    `heads` are the rows of an attention's products: a power of two up to 8.
    """

    rows: int
    vectors: int
    heads: int

    @property
    def columns(self) -> int:
        """Columns of a panel of weights."""
        return self.vectors * LANES


def tile() -> Tile:
    """The tile that fits the registers of this processor; the bits do not depend on it."""
    # What numba was told to compile for, which is this processor unless its settings say more.
    asked: str | None = getattr(config, "CPU_FEATURES", None)
    features = (asked or binding.get_host_cpu_features().flatten()).split(",")
    if "+avx512f" in features:
        return Tile(rows=8, vectors=2, heads=8)  # 16 sums, 2 weights and a factor in 32 registers
    if "+avx2" in features:
        return Tile(rows=6, vectors=1, heads=4)  # 12 halves of sums, 2 of weights, a factor in 16
    return Tile(rows=4, vectors=1, heads=4)


def _constant(number: int, like: Any) -> Any:
    return ir.Constant(like, number)


def _at(builder: Any, address: Any, floats: Any, kind: Any) -> Any:
    """A pointer to `kind`, so many floats behind an address."""
    size = _constant(4, address.type)
    return builder.inttoptr(builder.add(address, builder.mul(floats, size)), kind.as_pointer())


def _load(builder: Any, address: Any, floats: Any, kind: Any) -> Any:
    loaded = builder.load(_at(builder, address, floats, kind))
    loaded.align = 4
    return loaded


def _store(builder: Any, value: Any, address: Any, floats: Any) -> None:
    builder.store(value, _at(builder, address, floats, value.type)).align = 4


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    name = f"llvm.fma.v{LANES}f32" if a.type == _VECTOR else "llvm.fma.f32"
    function = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [a, b, c])


def _spread(builder: Any, value: Any) -> Any:
    """One number in all lanes."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, value, _INT32(0))
    lanes = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, lanes)


def _add(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


def _greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _join_lanes(builder: Any, vector: Any, join: Callable[[Any, Any, Any], Any]) -> Any:
    """Halves on halves, until one number is left."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (
            builder.shuffle_vector(
                vector,
                ir.Constant(vector.type, ir.Undefined),
                ir.Constant(ir.VectorType(_INT32, width), list(range(begin, begin + width))),
            )
            for begin in (0, width)
        )
        vector = join(builder, low, high)
    return builder.extract_element(vector, _INT32(0))


def _fold(
    builder: Any,
    length: Any,
    initial: float,
    further: Callable[[Any, Any], Any],
    join: Callable[[Any, Any, Any], Any],
) -> Any:
    """Fold `further(so far, place)` over a run of floats, lane by lane, then the lanes."""
    index = length.type
    one, lanes = _constant(1, index), _constant(LANES, index)
    whole = builder.and_(length, _constant(-LANES, index))
    vector = cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, [initial] * LANES))
    with cgutils.for_range_slice(builder, _constant(0, index), whole, lanes, index) as (at, _):
        builder.store(further(builder.load(vector), at), vector)
    number = cgutils.alloca_once(builder, _FLOAT)
    builder.store(_join_lanes(builder, builder.load(vector), join), number)
    with cgutils.for_range_slice(builder, whole, length, one, index) as (at, _):
        builder.store(further(builder.load(number), at), number)
    return builder.load(number)


def _fetch(builder: Any, address: Any, floats: Any) -> None:
    byte = ir.IntType(8)
    function = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), _INT32, _INT32, _INT32])
    prefetch = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
    # To be read, into the second-level cache, as data.
    builder.call(prefetch, [_at(builder, address, floats, byte), _INT32(0), _INT32(2), _INT32(1)])


def make_tile_product(rows: int, vectors: int, ahead: int = 0) -> Callable[..., None]:
    """The innermost product: `rows` rows by one panel of `vectors` vectors of columns.

    The function takes (x, x_stride, panel, length, out, out_stride, add): x [rows, length] and
    out [rows, columns] with their strides in floats, the panel [length, columns] without gaps,
    and `add`, which is 1 to add to `out` what is there. `length` is a multiple of UNROLL. Each
    sum runs through its products one by one, in order, whatever `rows`. What lies `ahead` steps
    of the sum further in the panel is fetched, if that is not 0.
    """

    def body(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, x_stride, panel, length, out, out_stride, add = arguments
        index = x.type
        row_starts = [
            builder.add(x, builder.mul(x_stride, _constant(4 * row, index))) for row in range(rows)
        ]
        entry = builder.block
        loop = builder.append_basic_block("along")
        done = builder.append_basic_block("done")
        builder.branch(loop)

        builder.position_at_end(loop)
        step = builder.phi(index)
        step.add_incoming(_constant(0, index), entry)
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        phis = [[builder.phi(_VECTOR) for _ in range(vectors)] for _ in range(rows)]
        sums: list[list[Any]] = [list(row) for row in phis]
        for offset in range(UNROLL):
            at = builder.add(step, _constant(offset, index))
            column = builder.mul(at, _constant(vectors * LANES, index))
            weights = []
            for vector in range(vectors):
                here = builder.add(column, _constant(vector * LANES, index))
                if ahead:
                    later = _constant(ahead * vectors * LANES, index)
                    _fetch(builder, panel, builder.add(here, later))
                weights.append(_load(builder, panel, here, _VECTOR))
            for row in range(rows):
                factor = _spread(builder, _load(builder, row_starts[row], at, _FLOAT))
                for vector in range(vectors):
                    sums[row][vector] = _fma(builder, factor, weights[vector], sums[row][vector])
        following = builder.add(step, _constant(UNROLL, index))
        step.add_incoming(following, loop)
        for phi_row, sum_row in zip(phis, sums, strict=True):
            for phi, total in zip(phi_row, sum_row, strict=True):
                phi.add_incoming(zero, entry)
                phi.add_incoming(total, loop)
        builder.cbranch(builder.icmp_signed("<", following, length), loop, done)

        builder.position_at_end(done)
        places = [
            (
                row,
                vector,
                builder.add(
                    builder.mul(out_stride, _constant(row, index)),
                    _constant(vector * LANES, index),
                ),
            )
            for row in range(rows)
            for vector in range(vectors)
        ]
        adds = builder.icmp_signed("!=", add, _constant(0, add.type))
        with builder.if_else(adds) as (then, otherwise):
            with then:
                for row, vector, place in places:
                    before = _load(builder, out, place, _VECTOR)
                    _store(builder, builder.fadd(before, sums[row][vector]), out, place)
            with otherwise:
                for row, vector, place in places:
                    _store(builder, sums[row][vector], out, place)
        return context.get_dummy_value()

    @intrinsic
    def tile_product(
        typing: Any,
        x: Any,
        x_stride: Any,
        panel: Any,
        length: Any,
        out: Any,
        out_stride: Any,
        add: Any,
    ) -> Any:
        return types.void(*[types.intp] * 7), body

    product: Callable[..., None] = tile_product
    return product


@intrinsic
def dot(typing: Any, a: Any, b: Any, length: Any) -> Any:
    """The sum of products of two runs of floats; what does not fill a vector comes last."""

    def body(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, length = arguments

        def further(total: Any, at: Any) -> Any:
            left, right = (_load(builder, side, at, total.type) for side in (a, b))
            return _fma(builder, left, right, total)

        return _fold(builder, length, 0.0, further, _add)

    return types.float32(types.intp, types.intp, types.intp), body


@intrinsic
def largest(typing: Any, a: Any, length: Any) -> Any:
    """The largest of a run of floats."""

    def body(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, length = arguments

        def further(most: Any, at: Any) -> Any:
            return _greater(builder, most, _load(builder, a, at, most.type))

        return _fold(builder, length, float("-inf"), further, _greater)

    return types.float32(types.intp, types.intp), body


def make_mix(rows: int, vectors: int) -> Callable[..., None]:
    """Weighted sums of the same rows of numbers, `rows` of them, `vectors` vectors wide.

    The function takes (base, places, weights, weights_stride, count, out, out_stride): summand
    i begins `places[i]` (int64) floats behind `base`; weights [rows, count] and out
    [rows, vectors * LANES] have strides in floats. Summands are added one by one, in order.
    """

    def body(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base, places, weights, weights_stride, count, out, out_stride = arguments
        index = base.type
        starts = [
            builder.add(weights, builder.mul(weights_stride, _constant(4 * row, index)))
            for row in range(rows)
        ]
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = [
            [cgutils.alloca_once_value(builder, zero) for _ in range(vectors)] for _ in range(rows)
        ]
        with cgutils.for_range(builder, count, intp=index) as loop:
            place = builder.load(
                builder.gep(builder.inttoptr(places, index.as_pointer()), [loop.index])
            )
            summand = [
                _load(builder, base, builder.add(place, _constant(vector * LANES, index)), _VECTOR)
                for vector in range(vectors)
            ]
            for row in range(rows):
                factor = _spread(builder, _load(builder, starts[row], loop.index, _FLOAT))
                for vector in range(vectors):
                    kept = sums[row][vector]
                    builder.store(_fma(builder, factor, summand[vector], builder.load(kept)), kept)
        for row in range(rows):
            for vector in range(vectors):
                place = builder.add(
                    builder.mul(out_stride, _constant(row, index)),
                    _constant(vector * LANES, index),
                )
                _store(builder, builder.load(sums[row][vector]), out, place)
        return context.get_dummy_value()

    @intrinsic
    def mix(
        typing: Any,
        base: Any,
        places: Any,
        weights: Any,
        weights_stride: Any,
        count: Any,
        out: Any,
        out_stride: Any,
    ) -> Any:
        return types.void(*[types.intp] * 7), body

    mixed: Callable[..., None] = mix
    return mixed


def make_sums(rows: int) -> Callable[..., None]:
    """Sums of `rows` rows of numbers, each added up one by one, in order.

    The function takes (values, stride, count, out): values [rows, count] and out [rows].
    """

    def body(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, stride, count, out = arguments
        index = values.type
        starts = [
            builder.add(values, builder.mul(stride, _constant(4 * row, index)))
            for row in range(rows)
        ]
        zero = ir.Constant(_FLOAT, 0.0)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows)]
        with cgutils.for_range(builder, count, intp=index) as loop:
            for start, kept in zip(starts, sums, strict=True):
                value = _load(builder, start, loop.index, _FLOAT)
                builder.store(builder.fadd(builder.load(kept), value), kept)
        for row, kept in enumerate(sums):
            _store(builder, builder.load(kept), out, _constant(row, index))
        return context.get_dummy_value()

    @intrinsic
    def add_up(typing: Any, values: Any, stride: Any, count: Any, out: Any) -> Any:
        return types.void(*[types.intp] * 4), body

    added: Callable[..., None] = add_up
    return added


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """A * b + c, rounded once."""

    def body(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _fma(builder, *arguments)

    return types.float32(*[types.float32] * 3), body


@intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:
    """The float with these bits (int32)."""

    def body(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), body


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """An address as a pointer without a type, for `numba.carray`."""

    def body(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), body


@intrinsic
def call(typing: Any, function: Any) -> Any:
    """Call the C function `int f(void)` at an address. Of `void f(void)` the result is rubbish."""

    def body(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_INT32, [])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [])

    return types.int32(types.intp), body
