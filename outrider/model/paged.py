"""A model with its KV pages: one forward over rows of several sequences."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.errors import UnsupportedModelError
from outrider.model.attention import STEP_ARGUMENT, KvShapes, PagedStep, Span
from outrider.model.blocks import BLOCK_TOKENS, BlockPool, BlockTable
from outrider.model.loading import LoadedModel


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one sequence in a step.

    The tokens sit at positions `table.kv_len` and on. The table's blocks must hold them
    (`BlockPool.grow`). Logits are wanted for the last `logit_rows` of them.
    """

    token_ids: Sequence[int]
    table: BlockTable
    logit_rows: int


class PagedModel:
    """A loaded model and `total_blocks` pages of KV of BLOCK_TOKENS tokens each."""

    def __init__(self, model: LoadedModel, total_blocks: int) -> None:
        self.vocab_size = model.vocab_size
        self.context_len = model.context_len
        self.pool = BlockPool(total_blocks)
        self._module = model.module
        parameter = next(model.module.parameters())
        self._device = parameter.device

        def pages(kv_heads: int, dim: int) -> torch.Tensor:
            shape = (total_blocks, BLOCK_TOKENS, kv_heads, dim)
            return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)

        self._pages = [
            (pages(heads, key_dim), pages(heads, value_dim))
            for heads, key_dim, value_dim in kv_shapes(model)
        ]

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Run every row once and write its KV to the pages; tables are left as they are.

        The caller advances `table.kv_len` by the rows that it keeps; not advancing is the
        rollback of a rejected row.

        Returns:
            float32 [sum of logit_rows, vocab_size], segment by segment.
        """
        spans: list[Span] = []
        tokens: list[int] = []
        wanted: list[int] = []
        for segment in segments:
            begin, end = len(tokens), len(tokens) + len(segment.token_ids)
            spans.append(Span(begin, end, segment.table.kv_len, segment.table.blocks))
            tokens.extend(segment.token_ids)
            wanted.extend(range(end - segment.logit_rows, end))
        positions = [p for span in spans for p in range(span.start, span.context)]
        # At least one row goes through the head: models take a slice of none for all.
        rows = torch.tensor(wanted or [0], device=self._device)
        output = self._module(
            input_ids=torch.tensor([tokens], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            use_cache=False,
            logits_to_keep=rows,
            **{STEP_ARGUMENT: PagedStep(self._pages, spans)},
        )
        logits: torch.Tensor = output.logits[0, : len(wanted)]
        return logits.float()


@torch.inference_mode()
def kv_shapes(model: LoadedModel) -> list[tuple[int, int, int]]:
    """(KV heads, key size, value size) of each layer, found by running one token."""
    probe = KvShapes()
    device = next(model.module.parameters()).device
    model.module(
        input_ids=torch.zeros((1, 1), dtype=torch.long, device=device),
        position_ids=torch.zeros((1, 1), dtype=torch.long, device=device),
        use_cache=False,
        **{STEP_ARGUMENT: probe},
    )
    if not probe.shapes:
        raise UnsupportedModelError(
            f"{model.module.config.model_type} does not call a pluggable attention"
        )
    return [probe.shapes[layer] for layer in sorted(probe.shapes)]


def block_bytes(model: LoadedModel) -> int:
    """Bytes that one block of KV takes over all layers."""
    size = next(model.module.parameters()).element_size()
    return sum(BLOCK_TOKENS * heads * (k + v) * size for heads, k, v in kv_shapes(model))
