"""Linears in tiles: which heights pass the measurement, and that only those are run."""

from collections.abc import Callable

import pytest
import torch

from outrider.model.linears.tiled import LiveRows, TiledLinear, equal_heights, torch_threads


def rows_plus(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x: x * 2 + change(x)


@pytest.mark.parametrize(
    ("change", "heights"),
    [
        # Nothing but the row itself.
        (lambda x: torch.zeros(()), (32, 16, 8, 4, 2, 1)),
        # The height: only the anchor agrees with itself.
        (lambda x: 1e-3 * torch.tensor(float(len(x))), (16,)),
        # The place in tiles of 16 and more.
        (lambda x: 1e-3 * (torch.arange(len(x))[:, None] >= 8), (8, 4, 2, 1)),
        # The neighbours, wherever there are any.
        (lambda x: 1e-3 * (x.sum() - x.sum(-1, keepdim=True)) * (len(x) > 1), (1,)),
        # The threads, in tiles of 16 and more.
        (lambda x: 1e-3 * torch.get_num_threads() * (len(x) > 8), (8, 4, 2, 1)),
        # The threads, always: then the present number of them must do.
        (lambda x: 1e-3 * torch.tensor(torch.get_num_threads()), (32, 16, 8, 4, 2, 1)),
    ],
)
def test_heights_of_tiles_are_those_with_equal_bits(
    change: Callable[[torch.Tensor], torch.Tensor], heights: tuple[int, ...]
) -> None:
    with torch_threads(1):
        found = equal_heights(rows_plus(change), 8, torch.float32, torch.device("cpu"))
    assert found == heights


def test_tiled_linear_runs_only_its_heights_and_only_live_rows() -> None:
    linear = torch.nn.Linear(8, 3)
    heights: list[int] = []
    linear.register_forward_hook(lambda _, args, __: heights.append(len(args[0])))
    live = LiveRows()
    tiled = TiledLinear(linear, (16, 4), live)
    x = torch.randn(2, 21, 8)
    torch.testing.assert_close(tiled(x), torch.nn.functional.linear(x, linear.weight, linear.bias))
    assert heights == [16, 16, 16]
    heights.clear()
    torch.testing.assert_close(tiled(x[0, :18]), tiled(x)[0, :18])
    assert heights[:2] == [16, 4]
    heights.clear()
    live.padded, live.live = 32, 3
    padded = torch.randn(1, 32, 8)
    assert tiled(padded).shape == (1, 32, 3)
    torch.testing.assert_close(tiled(padded)[0, :3], linear(padded)[0, :3])
    assert heights[0] == 4
    assert tiled.out_features == 3
    assert tiled.weight is linear.weight
