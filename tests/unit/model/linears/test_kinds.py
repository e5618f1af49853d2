"""Ways to multiply: each against float64, at every number of rows that a step may have."""

from collections.abc import Callable
from itertools import count

import pytest
import torch

from outrider.model.linears.choice import choose_kind
from outrider.model.linears.install import PackedLinear, Packer, pack_module
from outrider.model.linears.kinds import DENSE, KINDS, Kind, Linear

SHAPES = [(48, 32), (96, 40), (33, 17)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_multiplies_any_number_of_rows(kind: Kind, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator)
    assert kind.fits(weight)
    with torch.inference_mode():
        plain, biased = kind.make(weight, None), kind.make(weight, bias)
        for rows in (1, 2, 3, 7, 8, 9, 16, 33, 64, 257):
            x = torch.randn(rows, shape[1], generator=generator)
            expected = (x.double() @ weight.double().t()).float()
            torch.testing.assert_close(plain(x), expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(biased(x), expected + bias, rtol=1e-5, atol=1e-5)


def test_kinds_are_told_apart_by_their_times() -> None:
    """With a clock that charges each kind by rows: the cheapest over all row counts wins."""
    ticks = count()

    def charging(name: str, cost: Callable[[int], float]) -> Kind:
        def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
            def multiply(x: torch.Tensor) -> torch.Tensor:
                spent[0] += cost(len(x))
                return torch.nn.functional.linear(x, weight, bias)

            return multiply

        return Kind(name, lambda weight: True, make)

    spent = [0.0]

    def clock() -> float:
        next(ticks)
        return spent[0]

    steep = charging("steep", lambda rows: rows)
    flat = charging("flat", lambda rows: 3.0)
    choice = choose_kind(torch.zeros(512, 512), [steep, flat], clock)
    assert choice.kind.name == "flat"
    assert choice.seconds["steep"][8] == 8
    assert choice.seconds["flat"][8] == 3
    # Not worth it for less than the margin: the first stays.
    nearly = charging("nearly", lambda rows: rows * 0.99)
    assert choose_kind(torch.zeros(512, 512), [steep, nearly], clock).kind.name == "steep"


def test_a_kind_that_is_wrong_at_some_number_of_rows_is_never_used() -> None:
    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        def multiply(x: torch.Tensor) -> torch.Tensor:
            result = torch.nn.functional.linear(x, weight, bias)
            return result * 1.5 if len(x) == 17 else result

        return multiply

    wrong = Kind("wrong", lambda weight: True, make)
    weight = torch.randn(8, 8)
    choice = choose_kind(weight, [DENSE, wrong], iter(range(10**6)).__next__)
    assert choice.kind is DENSE
    unfit = Kind("unfit", lambda weight: False, make)
    assert choose_kind(weight, [unfit]).kind is DENSE


def test_packing_replaces_linears_and_keeps_results() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 16))
    x = torch.randn(2, 5, 32)
    with torch.inference_mode():
        expected = model(x)
        pack_module(model, Packer(kinds=[KINDS[1]]))
        assert isinstance(model[0], PackedLinear)
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_fused_layers_give_their_results_side_by_side() -> None:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(32, 16, bias=False), torch.nn.Linear(32, 48)
    x = torch.randn(7, 32)
    with torch.inference_mode():
        expected = torch.cat([first(x), second(x)], -1)
        product = Packer(kinds=[DENSE], kept=[second.weight]).fuse([first, second])
        torch.testing.assert_close(product(x), expected, rtol=1e-5, atol=1e-5)
    # Taken out of the one, kept in the other, which something else still reads.
    assert first.weight.untyped_storage().nbytes() == 4
    assert second.weight.untyped_storage().nbytes() == 32 * 48 * 4
