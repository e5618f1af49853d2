"""The directory that a training ends in: a draft model that `--draft-model` takes."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.training.acceptance import Acceptance
from outrider.training.network import DraftNetwork
from outrider.training.run import History

SECTION = "outrider_draft"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """What the network drafts for."""

    path: Path
    name: str
    fingerprint: str
    vocab_size: int
    layers: int
    context_len: int


def save(
    directory: Path,
    network: DraftNetwork,
    target: Target,
    ids: Sequence[int],
    *,
    trained_with: dict[str, Any],
) -> None:
    """Write config, weights (float16) and the target's tokenizer.

    `ids` are the target's ids of the rows of the network's head. Embeddings and head are the
    target's own and are not written. The maps of ids are those of EAGLE-3 checkpoints: target
    id = draft id + d2t[draft id], and t2d[target id] says whether the draft has it.
    """
    shape = network.shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": shape.num_hidden_layers,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": target.context_len,
        "vocab_size": len(ids),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        SECTION: {
            "reads_hidden": shape.reads_hidden,
            "target": target.name,
            "target_fingerprint": target.fingerprint,
            "target_hidden": shape.target_hidden,
            "target_layers": target.layers,
            "own_embeddings": False,
            "own_head": False,
            "trained_with": trained_with,
        },
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    kept = torch.tensor(ids)
    has = torch.zeros(target.vocab_size, dtype=torch.bool)
    has[kept] = True
    tensors = {
        (name if name.startswith(_FUSION) else f"model.{name}"): tensor.detach().half().contiguous()
        for name, tensor in network.state_dict().items()
    }
    tensors["d2t"], tensors["t2d"] = kept - torch.arange(len(ids)), has
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name in _TOKENIZER_FILES:
        if (target.path / name).is_file():
            shutil.copyfile(target.path / name, directory / name)


# What stands beside the layers, under its own name.
_FUSION = ("fuse.", "token_norm.", "hidden_norm.", "missing")


def write_report(
    directory: Path, history: History, held_out: Acceptance, *, about: dict[str, Any]
) -> None:
    """Write report.json, curve.png and the model card README.md."""
    report = {
        "about": about,
        "held_out": {**asdict(held_out), "mean_acceptance_length": held_out.mean_length},
        "looks": history.looks,
        # So that whoever trains it again can compare.
        "losses": [round(loss, 6) for loss in history.losses],
        "tokens_seen": history.tokens[-1] if history.tokens else 0,
    }
    (directory / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    _draw(directory / "curve.png", history)
    positions = ", ".join(f"{share:.3f}" for share in held_out.by_position)
    lines = [
        f"# A draft model for {about['target']}",
        "",
        f"Trained by `{about['command']}` with Outrider {about['version']}.",
        "",
        f"- Reads the target's hidden states: {'yes' if about['reads_hidden'] else 'no'}",
        f"- Parameters: {about['parameters']:,}, and the target's own embeddings and head, "
        f"cut to {about['head_ids']:,} ids",
        f"- Texts: {about['texts']:,} ({about['text_tokens']:,} tokens of the target's own), "
        f"{about['source']}; seed {about['seed']}; SHA-256 {about['texts_sha256']}",
        f"- Steps: {about['steps']:,}, {report['tokens_seen']:,} tokens seen; threads: "
        f"{about['threads']}",
        f"- On {about['held_out_texts']} texts held out, greedy, drafts of "
        f"{len(held_out.tried)} tokens: mean acceptance length "
        f"**{held_out.mean_length:.2f}**, accepted by position {positions}",
        "",
        "![Loss and acceptance](curve.png)",
        "",
        "The draft model changes how fast the target says something, never what it says.",
        "",
    ]
    (directory / "README.md").write_text("\n".join(lines))


def _draw(path: Path, history: History) -> None:
    # Not at the top: it takes long to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    width = max(len(history.losses) // 100, 1)
    smooth = [
        sum(history.losses[at : at + width]) / len(history.losses[at : at + width])
        for at in range(0, len(history.losses), width)
    ]
    left.plot([min(at, len(history.losses)) for at in range(0, len(history.losses), width)], smooth)
    left.set(xlabel="step", ylabel="KL divergence (nats)", title="Loss")
    left.set_ylim(bottom=0)
    steps = [step for step, _, _ in history.looks]
    right.plot(steps, [mean for _, mean, _ in history.looks], "k", label="mean acceptance length")
    right.set(xlabel="step", title="On texts held out", ylabel="tokens")
    share = right.twinx()
    for place in range(len(history.looks[0][2])):
        share.plot(
            steps,
            [shares[place] for _, _, shares in history.looks],
            "--",
            label=f"accepted at {place + 1}",
        )
    share.set(ylim=(0, 1), ylabel="share accepted")
    figure.legend(loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(path, dpi=110)
