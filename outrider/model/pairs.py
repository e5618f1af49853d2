"""A target and a draft model: whether they mean the same by the ids that can come out."""

from dataclasses import dataclass
from pathlib import Path

from outrider.model.describe import describe
from outrider.model.tokenizers import Tokenizer, check_pair, load_tokenizer, producible_ids


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tokenizers that agree on every id below `producible`, all that the target gives."""

    target: Tokenizer
    drafter: Tokenizer
    producible: int


def check_models(target: str, draft_model: str) -> Pair:
    """Compare the tokenizers of two checkpoints, without their weights.

    Of the target the tokenizer is enough; without its config every id has to agree.

    Raises:
        ConfigError: a checkpoint or its tokenizer can't be read.
        TokenizerMismatchError: they differ in an id that the target can produce.
    """
    ours, theirs = load_tokenizer(target), load_tokenizer(draft_model)
    has_config = (Path(target) / "config.json").is_file() or target.endswith(".gguf")
    rows = describe(target).vocab_size if has_config else ours.vocab_size
    producible = producible_ids(ours, rows)
    check_pair(ours, theirs, producible)
    return Pair(ours, theirs, producible)
