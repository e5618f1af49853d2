"""`outrider plan`."""

import json
from dataclasses import asdict, dataclass

import click

from outrider.config import command as settings_command
from outrider.config import setting
from outrider.memory import format_bytes, parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A model, and the GPUs that it is to be put on."""

    model: str = setting(
        help="A directory with a config.json, whose weights need not be there, or a .gguf file."
    )
    tensor_parallel_size: int = setting(1, at_least=1, help="Ranks, one GPU each.")
    gpu_memory: str = setting(
        "80GiB", help="Memory of each GPU; on a CPU, what each rank may take."
    )
    device: str = setting(
        "cuda", choices=("cuda", "cpu"), help="On a CPU the weights of a .gguf file stay packed."
    )
    dtype: str = setting(
        "bfloat16", choices=("float32", "bfloat16", "float16"), help="Type of weights and KV."
    )
    session_tokens: int = setting(
        4096, at_least=1, help="Tokens of a session, to tell how many sessions fit."
    )
    json: bool = setting(False, help="Print one JSON object.")

    def __post_init__(self) -> None:
        parse_bytes(self.gpu_memory)


def run(settings: Settings) -> None:
    """Tell what a model takes on each GPU, and how many sessions fit beside it.

    Nothing is loaded: the figures come from the shapes in config.json, by the rules that a verify
    worker loads by. It takes the blocks of KV that are told here when it is started with
    --kv-memory as told here; more than --max-sessions whole contexts it never takes.
    """
    # Not at the top: it imports torch, which takes long.
    from outrider.model.memory_plan import plan_memory

    plan = plan_memory(
        settings.model,
        settings.tensor_parallel_size,
        parse_bytes(settings.gpu_memory),
        dtype=settings.dtype,
        packed=settings.device == "cpu",
    )
    whole, usual = plan.sessions(plan.context_len), plan.sessions(settings.session_tokens)
    kv_bytes = min(rank.kv_bytes for rank in plan.ranks)
    if settings.json:
        ranks = [asdict(rank) for rank in plan.ranks]
        found = {
            "model": plan.name,
            "dtype": plan.dtype,
            "ranks": ranks,
            "kv_memory_bytes": kv_bytes,
            "kv_blocks": plan.blocks,
            "kv_tokens": plan.kv_tokens,
            "context_len": plan.context_len,
            "whole_contexts": whole,
            "session_tokens": settings.session_tokens,
            "sessions": usual,
        }
        click.echo(json.dumps(found))
        return
    click.echo(f"{plan.name} in {plan.dtype} on {len(plan.ranks)} x {settings.gpu_memory}")
    for rank in plan.ranks:
        click.echo(
            f"  rank {rank.rank}: weights {format_bytes(rank.weights_bytes)}, "
            f"KV {format_bytes(rank.kv_bytes)}, "
            f"of which a block takes {format_bytes(rank.block_bytes)}"
        )
        if rank.second_bytes:
            click.echo(
                f"    at most {format_bytes(rank.second_bytes)} more for packed weights "
                "that are kept in a second way, for many rows"
            )
    click.echo(
        f"  {plan.blocks} blocks of KV, {plan.kv_tokens} tokens: {usual} sessions of "
        f"{settings.session_tokens} tokens, or {whole} of the whole context ({plan.context_len})"
    )
    click.echo(f"  --kv-memory {kv_bytes}")


command = settings_command(Settings, run, name="plan")
