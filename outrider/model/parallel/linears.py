"""Layers over slices of their weights.

A layer split by columns is a plain `Linear` of fewer outputs; so is the head, whose logits are
then those of a slice of the vocabulary. What is left needs the other ranks.
"""

from typing import Protocol

import torch


class Peers(Protocol):
    """The other ranks, as far as layers need them; see `RankGroup`."""

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, in its place, on every rank."""
        ...


class RowLinear(torch.nn.Module):
    """A linear layer split by its inputs: rows [..., K / N] to [..., M], the sum of all ranks'.

    Only rank 0's `inner` has the bias, so that it is added once.
    """

    def __init__(self, inner: torch.nn.Linear, group: Peers) -> None:
        super().__init__()
        self.inner = inner
        self.group = group

    @property
    def weight(self) -> torch.Tensor:
        """This rank's slice [M, K / N]."""
        return self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product over all inputs."""
        return self.group.total(self.inner(x))


class VocabularyEmbedding(torch.nn.Module):
    """An embedding of which this rank has the tokens from `begin` on: ids [...] to [..., hidden].

    `inner` is the model's own embedding over the slice, with whatever it does besides (some
    scale their rows).
    """

    def __init__(self, inner: torch.nn.Embedding, begin: int, group: Peers) -> None:
        super().__init__()
        self.inner = inner
        self._begin = begin
        self._group = group

    @property
    def weight(self) -> torch.Tensor:
        """This rank's slice [V / N, hidden]."""
        return self.inner.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of all tokens; ids of other ranks count as nothing here."""
        size = len(self.inner.weight)
        local = ids - self._begin
        elsewhere = (local < 0) | (local >= size)
        rows = self.inner(local.clamp(0, size - 1))
        return self._group.total(rows.masked_fill(elsewhere[..., None], 0))
