"""Packed weights against the file format's own reader."""

import gguf
import numpy as np
import pytest
import torch

from outrider.model.linears.int4 import (
    Quantised,
    concatenated,
    make_int4,
    rows_to_unpack,
    supported,
)

KINDS = {name: gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0")}


def tensor(kind: str, outputs: int = 48, columns: int = 96, seed: int = 0) -> np.ndarray:
    weight = np.random.default_rng(seed).normal(size=(outputs, columns)).astype(np.float32)
    return gguf.quantize(weight, KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_integers_and_scales_are_the_files_own(kind: str) -> None:
    data = tensor(kind)
    expected = torch.from_numpy(gguf.dequantize(data, KINDS[kind]))
    assert torch.equal(Quantised.read(kind, data).dense(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_product_is_right_up_to_bfloat16(kind: str) -> None:
    weight = Quantised.read(kind, tensor(kind))
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(1))
    bias = torch.linspace(-1, 1, 48)
    expected = x @ weight.dense().t() + bias
    result = make_int4(weight, bias)(x)
    assert result.dtype == torch.float32
    error = (result - expected).norm() / expected.norm()
    # Rows, scales and results are rounded to 8 bits each.
    assert error < 2**-7


@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_bfloat16_holds_leave_no_error_but_that_of_the_result(kind: str) -> None:
    """With rows and scales that are exact in bfloat16, the integers must come out exactly."""
    weight = Quantised.read(kind, tensor(kind))
    ones = Quantised(
        weight.integers, torch.ones_like(weight.scale), torch.zeros_like(weight.scale), weight.bits
    )
    # One row for each column: the result is the weight itself.
    result = make_int4(ones, None)(torch.eye(96))
    expected = ones.dense().t()
    assert torch.equal(result, expected)


def test_many_rows_go_through_unpacked_chunks() -> None:
    weight = Quantised.read("Q4_1", tensor("Q4_1", outputs=2048 + 16))
    x = torch.randn(20, 96)
    product = make_int4(weight, None, many_rows=20)
    exact = x @ weight.dense().t()
    torch.testing.assert_close(product(x), exact, rtol=1e-5, atol=1e-5)
    # One row fewer takes the kernel, which rounds.
    assert not torch.allclose(product(x[:19]), exact[:19], rtol=1e-5, atol=1e-5)


def test_unpacking_is_used_where_it_is_measured_to_be_quicker() -> None:
    weight = Quantised.read("Q4_1", tensor("Q4_1"))
    # Each call takes two readings; the clock says how long the calls in turn took.
    quick = iter([0.0, 9.0, 0.0, 1.0] * 4)
    assert rows_to_unpack(weight, lambda: next(quick)) == 64
    slow = iter([0.0, 1.0, 0.0, 9.0] * 12)
    assert rows_to_unpack(weight, lambda: next(slow)) == 0


def test_only_weights_of_one_kind_are_joined() -> None:
    four, eight = Quantised.read("Q4_1", tensor("Q4_1")), Quantised.read("Q8_0", tensor("Q8_0"))
    other = Quantised.read("Q4_0", tensor("Q4_0", seed=2))
    joined = concatenated([four, other])
    assert joined is not None
    assert torch.equal(joined.dense(), torch.cat([four.dense(), other.dense()]))
    assert concatenated([four, eight]) is None


def test_shapes_that_the_kernel_lacks_are_not_taken() -> None:
    cpu = torch.device("cpu")
    assert supported(Quantised.read("Q4_1", tensor("Q4_1")), cpu)
    assert not supported(Quantised.read("Q4_1", tensor("Q4_1", outputs=40)), cpu)
    assert not supported(Quantised.read("Q4_1", tensor("Q4_1")), torch.device("meta"))
