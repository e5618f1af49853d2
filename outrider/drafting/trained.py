"""A drafter that was trained for its target, behind `DraftModel`."""

from collections.abc import Sequence
from typing import Protocol

import torch

from outrider.drafting.base import HiddenStates
from outrider.drafting.draft_model import DraftHead, Fed
from outrider.model.chains import Chains
from outrider.model.draft_network import DraftNetwork
from outrider.model.paged import Numerics, PagedModel
from outrider.model.pages import KvPages
from outrider.model.rows import StepOutput


class PagedChains(Chains, Protocol):
    """Chains that are told where KV is kept, keys by block."""

    def use(self, pages: KvPages) -> None:
        """Keep it there."""


class TrainedDraftModel:
    """A `DraftNetwork` with `total_blocks` of KV; a `DraftModel`.

    It never proposes an id from `token_count` on. `chains` are the same network's, if they can be
    had; they are used where `numerics` lays keys out as they do.
    """

    def __init__(
        self,
        network: DraftNetwork,
        *,
        total_blocks: int,
        token_count: int | None = None,
        numerics: Numerics | None = None,
        chains: PagedChains | None = None,
    ) -> None:
        model, config = network.model, network.config
        self.name = model.name
        self.context_len = model.context_len
        self.vocab_size = model.vocab_size
        self.head = DraftHead(token_count or model.vocab_size, network.head_ids)
        self.reads = (
            HiddenStates(config.target_layers, config.target_hidden)
            if config.reads_hidden
            else None
        )
        self._network = network
        self._paged = PagedModel(model, total_blocks, numerics)
        self.pool = self._paged.pool
        self.chains: Chains | None = None
        if chains is not None and numerics is not None and numerics.keys_by_block:
            chains.use(self._paged.pages)
            self.chains = chains

    @torch.inference_mode()
    def forward(self, fed: Sequence[Fed]) -> StepOutput:
        """Run the rows; see `DraftModel`."""
        token_ids: list[int] = []
        states: dict[int, torch.Tensor] = {}
        for one in fed:
            states.update({len(token_ids) + row: state for row, state in one.states.items()})
            token_ids += one.segment.token_ids
        # Made before the step, which may write where the states are.
        inputs = self._network.inputs(token_ids, states)
        output = self._paged.step([one.segment for one in fed], inputs)
        return StepOutput(output.logits.float(), output.hidden)
