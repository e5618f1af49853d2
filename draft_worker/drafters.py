"""The drafter that the settings ask for."""

from dataclasses import dataclass

from draft_worker.config import Settings
from outrider.drafting.base import Drafter
from outrider.drafting.ngram import NgramDrafter
from outrider.errors import ConfigError
from outrider.memory import format_bytes, parse_bytes


@dataclass(frozen=True, slots=True)
class ChosenDrafter:
    """A drafter and what the registry says about it.

    Fingerprints are empty and `context_len` is 0 for a drafter that fits any target. The
    fingerprint of the tokenizer is the target's where the pair was compared.
    """

    drafter: Drafter
    model_fingerprint: str = ""
    tokenizer_fingerprint: str = ""
    context_len: int = 0


def build(settings: Settings) -> ChosenDrafter:
    """Build the drafter; a model is loaded, which takes a while.

    Raises:
        ConfigError: the settings do not fit each other or the model.
        UnsupportedModelError: the draft model can't be served.
        TokenizerMismatchError: the draft model has another tokenizer than the target.
    """
    if settings.drafter == "model":
        return _model(settings)
    drafter = NgramDrafter(ngram_min=settings.ngram_min, ngram_max=settings.ngram_max)
    return ChosenDrafter(drafter)


def _model(settings: Settings) -> ChosenDrafter:
    # Imported here: a draft worker without a model starts without torch.
    import torch

    from outrider.drafting.model import ModelDrafter
    from outrider.model.loading import load_model
    from outrider.model.numerics import FAST, choose_numerics
    from outrider.model.paged import block_bytes
    from outrider.model.pairs import check_models
    from outrider.model.tokenizers import load_tokenizer, producible_ids
    from outrider.sampling import gumbel_max

    # Before the weights are read, which takes longer.
    pair = check_models(settings.target, settings.draft_model) if settings.target else None
    tokenizer = pair.drafter if pair else load_tokenizer(settings.draft_model)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model = load_model(settings.draft_model)
    total_blocks = parse_bytes(settings.kv_memory) // block_bytes(model)
    if not total_blocks:
        raise ConfigError(
            f"--kv-memory {settings.kv_memory} holds no block of "
            f"{format_bytes(block_bytes(model))} of {model.name}; give it more"
        )
    own = producible_ids(tokenizer, model.vocab_size)
    drafter = ModelDrafter(
        model,
        total_blocks=total_blocks,
        prefill_chunk=settings.prefill_chunk,
        token_count=min(own, pair.producible) if pair else own,
        tree_width=settings.tree_width,
        numerics=choose_numerics(FAST, model),
    )
    if model.module.device.type == "cpu":
        gumbel_max.prepare()
    # A tokenizer that differs only in ids that never come out counts as the target's own.
    fingerprint = (pair.target if pair else tokenizer).fingerprint
    return ChosenDrafter(drafter, model.fingerprint, fingerprint, model.context_len)
