"""Load a drafter that was trained for one target, as `outrider train` writes it.

For token x_i at position i, with e its embedding,

    reads_hidden:  x = fuse [norm(e) * token_norm, norm(f) * hidden_norm]
    otherwise:     x = e

goes through Llama layers, a norm and a head over R ids. f is the hidden state that the target's
head made x_i of (its input at position i - 1), or `missing` where that is not known; of a drafted
token it is what this network's own head made it of. After Li et al., "EAGLE", arXiv 2401.15077.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from outrider import logs
from outrider.errors import ConfigError
from outrider.model import attention
from outrider.model.describe import describe
from outrider.model.draft_config import DraftConfig, check_target, read_draft_config
from outrider.model.loading import LoadedModel, check_supported
from outrider.model.tables import Tables, Weights

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Fuse:
    """Makes one row of the network's input from a token's embedding and hidden state.

    `weight` [hidden, 2 * size]; the norms' weights and `missing` are [size].
    """

    weight: torch.Tensor
    token_norm: torch.Tensor
    hidden_norm: torch.Tensor
    missing: torch.Tensor
    eps: float

    def __call__(self, embedded: torch.Tensor, states: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Rows [N, hidden] of `embedded` [N, size] and the states that are known, by row."""
        hidden = self.missing.repeat(len(embedded), 1)
        if states:
            hidden[list(states)] = torch.stack(list(states.values()))
        size = self.missing.shape
        both = (
            functional.rms_norm(embedded, size, self.token_norm, self.eps),
            functional.rms_norm(hidden, size, self.hidden_norm, self.eps),
        )
        return functional.linear(torch.cat(both, -1), self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNetwork:
    """The network. `model` has no embeddings: what goes into its first layer is `inputs`.

    `embeddings` [V, size] are in the type of their file. `head_ids` int64 [R] is the target's id
    of each row of the head, ascending; None where that is the row.
    """

    model: LoadedModel
    config: DraftConfig
    embeddings: torch.Tensor
    fuse: Fuse | None
    head_ids: torch.Tensor | None

    def inputs(self, token_ids: Sequence[int], states: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Float32 [N, hidden] for N tokens of which some states [size] are known, by row."""
        embedded = functional.embedding(torch.tensor(token_ids), self.embeddings).float()
        return embedded if self.fuse is None else self.fuse(embedded, states)


def load_draft_network(path: str, target: str) -> DraftNetwork:
    """Load the drafter in `path` for the model in the directory `target`.

    Of the target, embeddings and head are read where the drafter has none of its own.

    Raises:
        ConfigError: it is no trained drafter, a tensor is missing or of another shape, or the
            target is not the one that it was trained for.
        UnsupportedModelError: its network can't be run.
    """
    draft = read_draft_config(path)
    if draft is None:
        raise ConfigError(f"{path} is no drafter that was trained for a target")
    if warning := check_target(path, draft, target):
        logs.get(__name__).warning(warning)
    config = AutoConfig.from_pretrained(path)
    check_supported(config)
    if config.model_type != "llama" or config.tie_word_embeddings:
        raise ConfigError(f"{path}: a trained drafter is a Llama with a head of its own")
    weights = Weights(path)
    tables = None if draft.own_embeddings and draft.own_head else Tables(target)
    embeddings = (
        weights.tensor(EMBEDDINGS)
        if tables is None or draft.own_embeddings
        else tables.embeddings()
    )
    vocab_size = len(embeddings)
    head_ids = _head_ids(weights, config.vocab_size, vocab_size, path)
    if tables is None or draft.own_head:
        head = weights.tensor(HEAD)
    else:
        head = tables.head()[head_ids] if len(head_ids) < vocab_size else tables.head()
    inner, size = config.hidden_size, draft.target_hidden
    _check_shape(embeddings, (vocab_size, size), f"embeddings of {path}")
    _check_shape(head, (config.vocab_size, inner), f"head of {path}")
    if inner != size:
        raise ConfigError(f"{path} has a hidden size of {inner}, and its target one of {size}")
    description = describe(path)
    model = LoadedModel(
        module=_module(config, weights, head, path),
        name=description.name,
        fingerprint=description.fingerprint,
        context_len=description.context_len,
        vocab_size=vocab_size,
        stop_ids=description.stop_ids,
    )
    return DraftNetwork(
        model=model,
        config=draft,
        embeddings=embeddings,
        fuse=_fuse(weights, config, size, path) if draft.reads_hidden else None,
        head_ids=head_ids if len(head_ids) < vocab_size else None,
    )


def _head_ids(weights: Weights, rows: int, vocab_size: int, path: str) -> torch.Tensor:
    """The target's id of each row of the head."""
    offsets, mask = weights.tensor("d2t"), weights.tensor("t2d")
    _check_shape(offsets, (rows,), f"d2t of {path}")
    _check_shape(mask, (vocab_size,), f"t2d of {path}")
    ids = torch.arange(rows) + offsets
    if not torch.equal(ids, mask.nonzero().flatten()):
        raise ConfigError(f"d2t and t2d of {path} do not name the same ids, in ascending order")
    return ids


def _fuse(weights: Weights, config: Any, size: int, path: str) -> Fuse:
    shapes = {
        "fuse.weight": (config.hidden_size, 2 * size),
        "token_norm.weight": (size,),
        "hidden_norm.weight": (size,),
        "missing": (size,),
    }
    tensors = {name: weights.tensor(name).float() for name in shapes}
    for name, shape in shapes.items():
        _check_shape(tensors[name], shape, f"{name} of {path}")
    weight, token_norm, hidden_norm, missing = tensors.values()
    return Fuse(weight, token_norm, hidden_norm, missing, config.rms_norm_eps)


@torch.no_grad()
def _module(config: Any, weights: Weights, head: torch.Tensor, path: str) -> PreTrainedModel:
    """The layers, the norm and the head, in float32; the embeddings have a single row."""
    attention.register()
    rows, config.vocab_size = config.vocab_size, 1
    config.pad_token_id = None
    factory: Any = AutoModelForCausalLM
    module = factory.from_config(config, dtype=torch.float32, attn_implementation=attention.NAME)
    for name, parameter in module.named_parameters():
        if name in (EMBEDDINGS, HEAD):
            continue
        tensor = weights.tensor(name)
        _check_shape(tensor, tuple(parameter.shape), f"{name} of {path}")
        parameter.copy_(tensor)
    config.vocab_size = module.config.vocab_size = rows
    with torch.device("meta"):
        module.lm_head = torch.nn.Linear(config.hidden_size, rows, bias=False)
    module.lm_head.weight = torch.nn.Parameter(head.float())
    loaded: PreTrainedModel = module.eval()
    return loaded


def _check_shape(tensor: torch.Tensor, shape: tuple[int, ...], what: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ConfigError(f"the {what} has the shape {list(tensor.shape)} instead of {list(shape)}")
