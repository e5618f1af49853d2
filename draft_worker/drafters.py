"""The drafter that the settings ask for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from draft_worker import config
from draft_worker.config import Settings
from outrider.drafting.base import Drafter, DraftRequest
from outrider.drafting.hybrid import HybridDrafter
from outrider.drafting.ngram import NgramDrafter
from outrider.drafting.suffix import SuffixDrafter
from outrider.errors import ConfigError
from outrider.memory import format_bytes, parse_bytes
from outrider.messages import SamplingParams

# Proposals that are made before the first session comes, and the tokens before and in them.
_WARM_UPS, _WARM_UP_TOKENS = 3, 4

if TYPE_CHECKING:
    from outrider.drafting.draft_model import DraftModel
    from outrider.drafting.model import ModelDrafter
    from outrider.model.loading import LoadedModel


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
    match settings.drafter:
        case config.NGRAM:
            return ChosenDrafter(
                NgramDrafter(ngram_min=settings.ngram_min, ngram_max=settings.ngram_max)
            )
        case config.SUFFIX:
            return ChosenDrafter(_suffix(settings))
        case config.EARLY_EXIT:
            return _early_exit(settings)
        case config.HYBRID:
            return _draft_model(settings, partial(HybridDrafter, _suffix(settings)))
        case _:
            return _draft_model(settings)


def _suffix(settings: Settings) -> SuffixDrafter:
    return SuffixDrafter(
        memory_bytes=parse_bytes(settings.suffix_memory), share_outputs=settings.share_outputs
    )


# What follows imports in functions: a draft worker without a model starts without torch.


def _draft_model(
    settings: Settings, around: "Callable[[ModelDrafter], Drafter] | None" = None
) -> ChosenDrafter:
    """A drafter with the draft model, `around` which another one may be."""
    from outrider.drafting.draft_model import PlainDraftModel
    from outrider.drafting.trained import TrainedDraftModel
    from outrider.model.compiled.draft_chains import DraftChains
    from outrider.model.draft_config import check_target, read_draft_config
    from outrider.model.draft_network import load_draft_network
    from outrider.model.loading import load_model
    from outrider.model.pairs import check_models
    from outrider.model.tokenizers import load_tokenizer, producible_ids

    # Before the weights are read, which takes longer.
    trained = read_draft_config(settings.draft_model)
    if trained is not None:
        check_target(settings.draft_model, trained, settings.target)
    pair = check_models(settings.target, settings.draft_model) if settings.target else None
    tokenizer = pair.drafter if pair else load_tokenizer(settings.draft_model)
    make: Callable[..., DraftModel]
    network = load_draft_network(settings.draft_model, settings.target) if trained else None
    model = network.model if network else load_model(settings.draft_model)
    own = producible_ids(tokenizer, model.vocab_size)
    token_count = min(own, pair.producible) if pair else own
    if network:
        # Before the weights are laid out anew.
        chains = DraftChains.of(network, token_count)
        make = partial(TrainedDraftModel, network, chains=chains)
    else:
        make = partial(PlainDraftModel, model)
    # A tokenizer that differs only in ids that never come out counts as the target's own.
    fingerprint = (pair.target if pair else tokenizer).fingerprint
    make = partial(make, token_count=token_count)
    return _running(settings, model, make, fingerprint, around)


def _early_exit(settings: Settings) -> ChosenDrafter:
    from outrider.drafting.draft_model import PlainDraftModel
    from outrider.model.early_exit import first_layers
    from outrider.model.loading import load_model
    from outrider.model.tokenizers import load_tokenizer, producible_ids

    tokenizer = load_tokenizer(settings.target)
    target = load_model(settings.target)
    layers = target.module.config.get_text_config().num_hidden_layers
    model = first_layers(target, settings.exit_layers or max(layers // 4, 1))
    token_count = producible_ids(tokenizer, model.vocab_size)
    make = partial(PlainDraftModel, model, token_count=token_count)
    return _running(settings, model, make, tokenizer.fingerprint)


def _running(
    settings: Settings,
    model: "LoadedModel",
    make: "Callable[..., DraftModel]",
    tokenizer_fingerprint: str,
    around: "Callable[[ModelDrafter], Drafter] | None" = None,
) -> ChosenDrafter:
    """A drafter around a model, which `make` gives its `total_blocks` and `numerics`."""
    import torch

    from outrider.drafting.model import ModelDrafter
    from outrider.model.numerics import FAST, choose_numerics
    from outrider.model.paged import block_bytes
    from outrider.sampling import gumbel_max

    if settings.threads:
        torch.set_num_threads(settings.threads)
    total_blocks = parse_bytes(settings.kv_memory) // block_bytes(model)
    if not total_blocks:
        raise ConfigError(
            f"--kv-memory {settings.kv_memory} holds no block of "
            f"{format_bytes(block_bytes(model))} of {model.name}; give it more"
        )
    model_drafter = ModelDrafter(
        make(total_blocks=total_blocks, numerics=choose_numerics(FAST, model)),
        prefill_chunk=settings.prefill_chunk,
        tree_width=settings.tree_width,
    )
    if model.module.device.type == "cpu":
        gumbel_max.prepare()
    drafter = around(model_drafter) if around else model_drafter
    _warm_up(drafter)
    return ChosenDrafter(drafter, model.fingerprint, tokenizer_fingerprint, model.context_len)


def _warm_up(drafter: Drafter) -> None:
    """Draft a little, so that the first session does not wait for what is done only once."""
    name = "warm-up"
    drafter.open(name, range(_WARM_UP_TOKENS), SamplingParams())
    for _ in range(_WARM_UPS):
        drafter.propose([DraftRequest(name, _WARM_UP_TOKENS)])
    drafter.close(name)
