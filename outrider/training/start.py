"""What a draft network begins with: parts of the target, or a least-squares guess."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from outrider.errors import ConfigError
from outrider.training.corpus import Example
from outrider.training.network import DraftNetwork, Shape

# Weight of the identity in the least squares, in tokens.
_RIDGE = 30.0
# More texts than that teach a linear map nothing.
_LEAST_SQUARES_TEXTS = 3000


def shape_of(config: Any, *, layers: int, reads_hidden: bool) -> Shape:
    """A network of `layers` layers that look like the target's.

    Where the target is not built like Llama, its heads are kept and the rest is Llama's.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    rope = getattr(text, "rope_parameters", None) or {}
    return Shape(
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        num_hidden_layers=layers,
        rope_theta=float(rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10_000.0),
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-5,
        target_hidden=text.hidden_size,
        reads_hidden=reads_hidden,
    )


def shape_from(config: dict[str, Any], target: Shape) -> Shape:
    """The shape that a config.json of Llama asks for, for the same target.

    Raises:
        ConfigError: it lacks a size, or its hidden size can't read the target's embeddings.
    """
    names = [
        "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers",
    ]  # fmt: skip
    lacking = [name for name in names if not isinstance(config.get(name), int)]
    if lacking:
        raise ConfigError(f"the config of the draft model lacks {', '.join(lacking)}")
    heads = config["num_attention_heads"]
    shape = replace(
        target,
        **{name: config[name] for name in names},
        num_key_value_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rope_theta=float(config.get("rope_theta", target.rope_theta)),
    )
    if shape.hidden_size != target.target_hidden:
        raise ConfigError(
            f"a draft model with the target's embeddings and head has its hidden size of "
            f"{target.target_hidden}, not {shape.hidden_size}"
        )
    return shape


def frequent_ids(examples: Iterable[Example], count: int, vocab_size: int) -> list[int]:
    """The `count` ids that answers have most often, in their order; any others to fill up."""
    counts = Counter[int]()
    for example in examples:
        counts.update(example.answer)
    count = min(count, vocab_size)
    found = [token for token, _ in counts.most_common(count)]
    known = set(found)
    others = (token for token in range(vocab_size) if token not in known)
    return sorted([*found, *(next(others) for _ in range(count - len(found)))])


def copy_layers(network: DraftNetwork, layers: Sequence[torch.nn.Module]) -> None:
    """Begin with these layers of a Llama-like target, as far as names and sizes agree.

    Raises:
        ConfigError: they don't.
    """
    for own, other in zip(network.layers, layers, strict=True):
        state = other.state_dict()
        needed = own.state_dict()
        wrong = [
            name
            for name, tensor in needed.items()
            if name not in state or state[name].shape != tensor.shape
        ]
        if wrong:
            raise ConfigError(
                f"the target's layers lack {wrong[0]} of the draft model's size; begin from "
                "scratch with --start scratch"
            )
        own.load_state_dict({name: state[name].float() for name in needed})


def draft_ids(directory: Path) -> list[int]:
    """The target's ids of the rows of a trained draft model's head.

    Raises:
        ConfigError: there is no such model.
    """
    offsets = _tensors(directory)["d2t"]
    ids: list[int] = (offsets + torch.arange(len(offsets))).tolist()
    return ids


def copy_draft(network: DraftNetwork, directory: Path) -> None:
    """Go on from a draft model that was trained before.

    Raises:
        ConfigError: there is none, or it is of another shape.
    """
    tensors = _tensors(directory)
    state = {
        name.removeprefix("model."): tensor.float()
        for name, tensor in tensors.items()
        if name not in ("d2t", "t2d")
    }
    needed = network.state_dict()
    if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in needed.items()}:
        raise ConfigError(
            f"{directory} is a draft model of another shape; give --layers and --reads-hidden as "
            "it was trained"
        )
    network.load_state_dict(state)


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    path = directory / "model.safetensors"
    if not path.is_file():
        raise ConfigError(f"no draft model in {directory}: there is no {path.name}")
    tensors = load_file(path)
    if "d2t" not in tensors:
        raise ConfigError(f"{directory} is no draft model that `outrider train` has written")
    return tensors


@torch.no_grad()
def least_squares(
    network: DraftNetwork, examples: Sequence[Example], norm_weight: torch.Tensor
) -> None:
    """Let `fuse` alone guess the next hidden state, and the layers add nothing to it.

    The guess minimises, over the answers, the squared distance to the next state before the
    target's last norm is weighted: states / norm_weight. What the layers add begins at zero,
    which is where the residuals begin, too.
    """
    network.norm.weight.copy_(norm_weight)
    for layer in network.stack:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    size = network.shape.target_hidden
    products = torch.zeros(2 * size, 2 * size, dtype=torch.float64)
    targets = torch.zeros(2 * size, size, dtype=torch.float64)
    for example in examples[:_LEAST_SQUARES_TEXTS]:
        states = torch.from_numpy(example.hidden.astype(np.float32))
        ids = torch.tensor(example.answer)
        embedded = torch.nn.functional.embedding(ids[:-1], network.embeddings)
        x = torch.cat([network.token_norm(embedded), network.hidden_norm(states[:-1])], -1)
        products += (x.T @ x).double()
        targets += (x.T @ (states[1:] / norm_weight)).double()
    products += _RIDGE * torch.eye(2 * size, dtype=torch.float64)
    network.fuse.weight.copy_(torch.linalg.solve(products, targets).T.float())


def positions_of(ids: Sequence[int], vocab_size: int) -> torch.Tensor:
    """The draft's id of each of the target's, -1 where it has none: int64 [V]."""
    found = torch.full((vocab_size,), -1)
    found[torch.tensor(ids)] = torch.arange(len(ids))
    return found
