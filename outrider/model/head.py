"""What goes into and comes out of a model's own code: embeddings in, the rows of its head."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from transformers import PreTrainedModel


class HeadInput:
    """While it is entered, keeps what the head of a model is given: `rows` [W, hidden]."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.rows = torch.empty(0)
        untyped: Any = module
        self._head: torch.nn.Module = untyped.get_output_embeddings()

    def __enter__(self) -> Self:
        self._hook = self._head.register_forward_pre_hook(self._keep)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hook.remove()

    def _keep(self, module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        self.rows = arguments[0].flatten(0, -2)


def input_arguments(
    token_ids: Sequence[int], inputs: torch.Tensor | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """The arguments of a model's forward for N tokens, or for rows [N, hidden] in their place."""
    if inputs is None:
        return {"input_ids": torch.tensor([token_ids], device=device)}
    return {"inputs_embeds": inputs[None]}
