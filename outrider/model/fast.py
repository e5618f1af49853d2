"""`numerics = fast`: every row of a step at once, each sequence's rows attending together.

Sums in floating point depend on the shape of the batch, so a row's logits may differ in the
last bits with what shares its step.
"""

from typing import ClassVar

import torch
from transformers import PreTrainedModel

from outrider.model.attention import STEP_ARGUMENT, How
from outrider.model.flex import AttentionKind
from outrider.model.head import HeadInput, input_arguments
from outrider.model.paged_attention import PagedAttention, StepAttention
from outrider.model.pages import KvPages
from outrider.model.rows import StepOutput, StepRows


class FastNumerics:
    """One forward of the model's own code over all rows, with that attention over pages."""

    arithmetic: ClassVar[str] = "fast"
    keys_by_block: ClassVar[bool] = False

    def __init__(self, attention: AttentionKind = PagedAttention) -> None:
        self._attention = attention

    def run(
        self,
        module: PreTrainedModel,
        pages: KvPages,
        rows: StepRows,
        inputs: torch.Tensor | None = None,
    ) -> StepOutput:
        """Run the step; see `Numerics`."""
        # At least one row goes through the head: models take a slice of none for all.
        wanted = torch.tensor(rows.wanted or [0], device=pages.device)
        with HeadInput(module) as head:
            output = module(
                **input_arguments(rows.token_ids, inputs, pages.device),
                position_ids=torch.tensor([rows.positions], device=pages.device),
                use_cache=False,
                logits_to_keep=wanted,
                **{STEP_ARGUMENT: FastStep(pages, self._attention(pages, rows.spans))},
            )
        count = len(rows.wanted)
        return StepOutput(output.logits[0, :count], head.rows[:count])


class FastStep:
    """What the registered attention finds: writes KV to the pages and attends over them."""

    def __init__(self, pages: KvPages, attention: StepAttention) -> None:
        self._pages = pages
        self._attention = attention

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How
    ) -> torch.Tensor:
        """Write k and v, then attend: q [H, N, D] to [N, H, Dv]."""
        self._pages.write(layer, self._attention.slots, k, v)
        return self._attention.attend(layer, q.transpose(0, 1), how)
