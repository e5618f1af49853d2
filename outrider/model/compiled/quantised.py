"""Products with weights of 8 bits, for drafts, which nothing has to be exact for.

A weight [N, K] lies as panels of `COLUMNS` columns, [ceil(N / COLUMNS), K, COLUMNS] signed bytes,
with one float32 scale a column: a product reads a quarter of the memory of float32. Sums are
float32 and not in an order that other processors would keep.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from outrider.model.compiled import vectors
from outrider.model.compiled.vectors import LANES

# Vectors of a panel: enough sums at once that none waits for the one before it.
_VECTORS = 4
COLUMNS = _VECTORS * LANES
_FLOAT_BYTES = 4
_LARGEST = 127
# How far ahead weights are fetched, in steps of the sum.
_AHEAD = 64


def padded(columns: int) -> int:
    """Columns of a product's result in memory: whole panels."""
    return -(-columns // COLUMNS) * COLUMNS


def panels(weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [N, K] one below the other as int8 panels, and their scales [padded(sum N)]."""
    whole = torch.cat([weight.detach().float() for weight in weights])
    rows, length = whole.shape
    scales = torch.zeros(padded(rows))
    scales[:rows] = whole.abs().amax(1) / _LARGEST
    packed = torch.zeros(padded(rows), length, dtype=torch.int8)
    packed[:rows] = (whole / scales[:rows, None].clamp_min(1e-30)).round().to(torch.int8)
    return packed.view(-1, COLUMNS, length).transpose(1, 2).contiguous(), scales


def make_product(rows: int) -> Callable[..., None]:
    """`rows` rows by one panel.

    The function takes (x, x_stride, panel, scales, length, out, out_stride, add); see
    `vectors.make_tile_product`. `scales` are those of the panel.
    """
    number, index_type, byte = ir.FloatType(), ir.IntType(64), ir.IntType(8)
    vector_type = ir.VectorType(number, LANES)
    bytes_type = ir.VectorType(byte, LANES)
    unroll = vectors.UNROLL

    def body(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, x_stride, panel, scales, length, out, out_stride, add = arguments

        def constant(value: int) -> Any:
            return index_type(value)

        def spot(address: Any, offset: Any, size: int, kind: Any) -> Any:
            place = builder.add(address, builder.mul(offset, constant(size)))
            return builder.inttoptr(place, kind.as_pointer())

        def load(address: Any, offset: Any, size: int, kind: Any) -> Any:
            loaded = builder.load(spot(address, offset, size, kind))
            loaded.align = size
            return loaded

        def fma(a: Any, b: Any, c: Any) -> Any:
            kind = ir.FunctionType(vector_type, [vector_type] * 3)
            name = f"llvm.fma.v{LANES}f32"
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(function, [a, b, c])

        def fetch(address: Any, offset: Any) -> None:
            i32 = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), i32, i32, i32])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            builder.call(function, [spot(address, offset, 1, byte), i32(0), i32(2), i32(1)])

        def spread(value: Any) -> Any:
            undefined = ir.Constant(vector_type, ir.Undefined)
            first = builder.insert_element(undefined, value, ir.IntType(32)(0))
            lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
            return builder.shuffle_vector(first, undefined, lanes)

        starts = [
            builder.add(x, builder.mul(x_stride, constant(_FLOAT_BYTES * row)))
            for row in range(rows)
        ]
        entry = builder.block
        loop, done = builder.append_basic_block("along"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(index_type)
        step.add_incoming(constant(0), entry)
        zero = ir.Constant(vector_type, [0.0] * LANES)
        phis = [[builder.phi(vector_type) for _ in range(_VECTORS)] for _ in range(rows)]
        sums: list[list[Any]] = [list(row) for row in phis]
        for offset in range(unroll):
            at = builder.add(step, constant(offset))
            column = builder.mul(at, constant(COLUMNS))
            fetch(panel, builder.add(column, constant(_AHEAD * COLUMNS)))
            weights = [
                builder.sitofp(
                    load(panel, builder.add(column, constant(v * LANES)), 1, bytes_type),
                    vector_type,
                )
                for v in range(_VECTORS)
            ]
            for row in range(rows):
                factor = spread(load(starts[row], at, _FLOAT_BYTES, number))
                for v in range(_VECTORS):
                    sums[row][v] = fma(factor, weights[v], sums[row][v])
        following = builder.add(step, constant(unroll))
        step.add_incoming(following, loop)
        for phi_row, sum_row in zip(phis, sums, strict=True):
            for phi, total in zip(phi_row, sum_row, strict=True):
                phi.add_incoming(zero, entry)
                phi.add_incoming(total, loop)
        builder.cbranch(builder.icmp_signed("<", following, length), loop, done)

        builder.position_at_end(done)
        adds = builder.icmp_signed("!=", add, constant(0))
        for v in range(_VECTORS):
            scale = load(scales, constant(v * LANES), _FLOAT_BYTES, vector_type)
            for row in range(rows):
                place = builder.add(builder.mul(out_stride, constant(row)), constant(v * LANES))
                before = builder.select(adds, load(out, place, _FLOAT_BYTES, vector_type), zero)
                result = fma(sums[row][v], scale, before)
                builder.store(result, spot(out, place, _FLOAT_BYTES, vector_type)).align = 4
        return context.get_dummy_value()

    @intrinsic
    def product(
        typing: Any,
        x: Any,
        x_stride: Any,
        panel: Any,
        scales: Any,
        length: Any,
        out: Any,
        out_stride: Any,
        add: Any,
    ) -> Any:
        return types.void(*[types.intp] * 8), body

    made: Callable[..., None] = product
    return made
