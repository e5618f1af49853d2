"""A model with its KV pages: one forward over rows of several sequences."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from transformers import PreTrainedModel

from outrider.errors import UnsupportedModelError
from outrider.model.attention import STEP_ARGUMENT, KvShapes
from outrider.model.blocks import BLOCK_TOKENS, BlockPool, BlockTable
from outrider.model.fast import FastNumerics
from outrider.model.linears.install import require_weights
from outrider.model.loading import LoadedModel
from outrider.model.pages import KvPages
from outrider.model.rows import NO_PARENT, Segment, Span, StepOutput, StepRows, flatten
from outrider.sampling.scores import Choosing, Scores, WholeScores

__all__ = [
    "NO_PARENT",
    "Numerics",
    "PagedModel",
    "Segment",
    "StepModel",
    "block_bytes",
    "kv_shapes",
]


class Numerics(Protocol):
    """How the rows of a step go through the model (see `outrider.model.numerics`).

    `arithmetic` names how it is computed: sessions move among workers where it is the same.
    `keys_by_block`: how it wants its pages (see `KvPages`).
    """

    arithmetic: ClassVar[str]
    keys_by_block: ClassVar[bool]

    def run(
        self,
        module: PreTrainedModel,
        pages: KvPages,
        rows: StepRows,
        inputs: torch.Tensor | None = None,
    ) -> StepOutput:
        """Run the step and keep its KV.

        `inputs` [N, hidden], if given, go into the first layer in the place of the embeddings of
        the tokens.
        """
        ...


class StepModel(Protocol):
    """What a verify worker runs its steps on: a `PagedModel`, or one split over ranks."""

    @property
    def pool(self) -> BlockPool:
        """The blocks of its pages."""
        ...

    def score(self, segments: Sequence[Segment], choosing: Choosing) -> Scores:
        """Run every row once; see `PagedModel.score`."""
        ...

    def keep_paths(self, kept: Sequence[tuple[BlockTable, Sequence[int]]]) -> None:
        """Bring the KV of accepted rows together; see `PagedModel.keep_path`."""
        ...


class PagedModel:
    """A loaded model and `total_blocks` pages of KV of BLOCK_TOKENS tokens each."""

    def __init__(
        self, model: LoadedModel, total_blocks: int, numerics: Numerics | None = None
    ) -> None:
        """Without `numerics` the model's own code runs, over its own weights.

        Raises:
            InternalError: these are gone, into numerics that were chosen before.
        """
        self.vocab_size = model.vocab_size
        self.context_len = model.context_len
        self.pool = BlockPool(total_blocks)
        self._module = model.module
        if numerics is None:
            require_weights(model.module)
        self._numerics = numerics or FastNumerics()
        self.arithmetic = self._numerics.arithmetic
        parameter = next(model.module.parameters())
        self._pages = KvPages(
            kv_shapes(model),
            total_blocks,
            dtype=parameter.dtype,
            device=parameter.device,
            keys_by_block=self._numerics.keys_by_block,
        )

    @property
    def pages(self) -> KvPages:
        """Where its KV is."""
        return self._pages

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Run every row once and write its KV to the pages; tables are left as they are.

        The caller advances `table.kv_len` by the rows that it keeps; not advancing is the
        rollback of a rejected row. Of a tree, `keep_path` comes first.

        Returns:
            float32 [sum of logit_rows, vocab_size], segment by segment.

        Raises:
            ValueError: the parents of a segment are no tree.
        """
        return self.step(segments).logits.float()

    @torch.inference_mode()
    def step(self, segments: Sequence[Segment], inputs: torch.Tensor | None = None) -> StepOutput:
        """`forward`, with the hidden states that the logits are made of, in the model's type.

        `inputs` [rows, hidden] take the place of the tokens' embeddings.
        """
        return self._numerics.run(self._module, self._pages, flatten(segments), inputs)

    def score(self, segments: Sequence[Segment], choosing: Choosing) -> Scores:
        """`step`, for tokens to be chosen."""
        output = self.step(segments)
        return WholeScores(output.logits, output.hidden, choosing)

    @torch.inference_mode()
    def keep_path(self, table: BlockTable, rows: Sequence[int]) -> None:
        """Bring the KV of accepted rows together, after a step whose rows were a tree.

        `rows` are rows of the segment, the first being 0, in the order of the text: those
        before the tree and then the accepted path. Their KV ends up at `table.kv_len` and on,
        and the caller advances `table.kv_len` by `len(rows)`.
        """
        self.keep_paths([(table, rows)])

    @torch.inference_mode()
    def keep_paths(self, kept: Sequence[tuple[BlockTable, Sequence[int]]]) -> None:
        """`keep_path` for several sequences at once."""
        self.move(moves_of(kept))

    @torch.inference_mode()
    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy KV from slots to slots, all at once (see `Span.slot`)."""
        if moves:
            source, target = torch.tensor(list(moves)).to(self._pages.device).unbind(1)
            self._pages.move(source, target)


def moves_of(kept: Sequence[tuple[BlockTable, Sequence[int]]]) -> list[tuple[int, int]]:
    """From which slot to which the KV of accepted rows has to go."""
    moves = []
    for table, rows in kept:
        span = Span(0, 0, table.kv_len, table.blocks)
        moves += [
            (span.slot(table.kv_len + row), span.slot(table.kv_len + i))
            for i, row in enumerate(rows)
            if row != i
        ]
    return moves


@torch.inference_mode()
def kv_shapes(model: LoadedModel) -> list[tuple[int, int, int]]:
    """(KV heads, key size, value size) of each layer, found by running one token.

    The model may be on the meta device.
    """
    probe = KvShapes()
    device = next(model.module.parameters()).device
    # Without a mask transformers looks at the numbers of the positions, which may not be there.
    mask = {"attention_mask": torch.ones((1, 1), device=device)} if device.type == "meta" else {}
    model.module(
        input_ids=torch.zeros((1, 1), dtype=torch.long, device=device),
        position_ids=torch.zeros((1, 1), dtype=torch.long, device=device),
        use_cache=False,
        **mask,
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
