"""At start: does the paged forward agree with the model's own? A model that has something
that paging does not know (a recurrent state, its own mask, unusual positions) fails here."""

import torch

from outrider.errors import UnsupportedModelError
from outrider.model.attention import NAME
from outrider.model.blocks import BLOCK_TOKENS, BlockTable
from outrider.model.loading import LoadedModel
from outrider.model.paged import PagedModel, Segment

# Past two blocks, so that tables and offsets are exercised.
PROBE_TOKENS = 2 * BLOCK_TOKENS + 5
_MAX_WINDOW = 512
# In bfloat16 eager and fused attention differ by a quarter of the spread on a model of 135M.
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 5e-1}


def check_paged_forward(model: LoadedModel, paged: PagedModel) -> float:
    """Compare the two on fixed tokens and return the largest difference.

    The tokens go in as a prefill chunk, a rejected draft and a verification, beside another
    sequence. The difference is relative to the spread of the logits.

    Raises:
        UnsupportedModelError: they differ by more than rounding.
    """
    length = _probe_length(model)
    if length < 8 or paged.pool.free < 2 * -(-(length + 1) // BLOCK_TOKENS):
        return 0.0
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocab_size, (length,), generator=generator).tolist()
    expected = _own_forward(model, tokens)
    actual = _paged_forward(paged, tokens)
    difference = float((expected - actual).abs().max() / expected.std().clamp_min(1e-6))
    tolerance = _TOLERANCE[model.module.dtype]
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"{model.name} can't be served exactly: between its own forward and the paged one its "
            f"logits differ by {difference:.2g} of their spread ({tolerance:g} would be rounding). "
            f"Its attention ({model.module.config.model_type}) has something that paging lacks"
        )
    return difference


def _probe_length(model: LoadedModel) -> int:
    """Long enough to pass a sliding window where that is cheap."""
    window = getattr(model.module.config.get_text_config(), "sliding_window", None) or 0
    wanted = window + PROBE_TOKENS if window <= _MAX_WINDOW else PROBE_TOKENS
    return min(wanted, model.context_len - 1)


@torch.inference_mode()
def _own_forward(model: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """Logits of the last four tokens by the model's own eager attention: [4, V]."""
    module = model.module
    module.set_attn_implementation("eager")
    try:
        ids = torch.tensor([tokens], device=module.device)
        logits: torch.Tensor = module(input_ids=ids, use_cache=False).logits
    finally:
        module.set_attn_implementation(NAME)
    return logits[0, -4:].float()


def _paged_forward(paged: PagedModel, tokens: list[int]) -> torch.Tensor:
    """The same logits through pages: [4, V]."""
    table, other = BlockTable(), BlockTable()
    split = len(tokens) - 4
    paged.pool.grow(table, len(tokens) + 1)
    paged.pool.grow(other, len(tokens) + 1)
    try:
        neighbour = Segment(tokens[::-1], other, 0)
        paged.forward([neighbour, Segment(tokens[: split - 2], table, 0)])
        table.kv_len = split - 2
        rejected = [tokens[split - 2], *(tokens[0],) * 4]
        paged.forward([Segment(rejected, table, 5)])
        table.kv_len = split - 1
        other.kv_len = len(tokens)
        last = Segment(tokens[split - 1 :], table, 4)
        return paged.forward([Segment(tokens[:1], other, 1), last])[1:]
    finally:
        paged.pool.release(table)
        paged.pool.release(other)
