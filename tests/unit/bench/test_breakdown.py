"""Operators are sorted into kinds, and a step's parts add up to it."""

import torch

from bench.breakdown import (
    ATTENTION,
    COMPILED,
    LINEARS,
    OTHER,
    REST,
    break_down,
    functions,
    kind_of,
)


def test_operators_by_kind() -> None:
    for name in ("aten::addmm", "mkldnn::_linear_pointwise", "mkl::_mkl_linear", "aten::mm"):
        assert kind_of(name) == LINEARS
    assert kind_of("aten::_weight_int4pack_mm_for_cpu") == LINEARS
    for name in ("aten::scaled_dot_product_attention", "aten::bmm", "aten::baddbmm"):
        assert kind_of(name) == ATTENTION
    for name in ("aten::silu", "aten::add_", "aten::index_copy_", "aten::rms_norm"):
        assert kind_of(name) == OTHER


def test_the_parts_are_of_one_step() -> None:
    x = torch.randn(256, 256)

    def step() -> None:
        for _ in range(4):
            torch.mm(x, x)
        torch.nn.functional.silu(x)

    parts = break_down(step, 5)
    by_name = {operator.name: operator for operator in parts.operators}
    assert by_name["aten::mm"].calls == 4
    assert by_name["aten::silu"].calls == 1
    assert parts.seconds[LINEARS] == by_name["aten::mm"].seconds
    taken = [operator.seconds for operator in parts.operators]
    assert taken == sorted(taken, reverse=True)
    assert set(parts.seconds) == {COMPILED, LINEARS, ATTENTION, OTHER, REST}
    assert parts.seconds[REST] >= 0


def test_functions_are_named() -> None:
    def a_slow_function() -> None:
        sum(range(10_000))

    assert "a_slow_function" in functions(a_slow_function, 3)
