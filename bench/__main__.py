"""`python -m bench NAME`."""

import importlib
import sys

import click

from outrider import logs
from outrider.config import command
from outrider.errors import OutriderError

NAMES = {
    "parity": "Same tokens as transformers, and whatever drafts, batches or dies.",
    "fleet": "16 sessions over two of each worker while draft workers come and go.",
    "soak": "Everything killed, stopped, cut off and slowed at random under load.",
    "failover": "From the kill of a process to the next token of its sessions.",
    "cancel": "From the end of many streams until the workers hold nothing of them.",
    "log-cost": "Tokens per second with the token log over without.",
    "law": "Chi-square of 50,000 outcomes through real services, for each rule.",
    "invariance": "Same seeded tokens, whatever drafts, however far, in any batch.",
    "acceptance": "Acceptance rates of both rules, and what their drafts weigh on the wire.",
    "selfcheck": "What the check of a model at start finds, and what faults come to.",
    "numerics": "What invariant numerics cost, and how often fast ones flip a token.",
    "waiting": "Ways to wait for drafts, across latencies, on a virtual clock.",
    "draft-length": "The chosen draft length against fixed ones, on recorded drafts.",
    "single": "One plain session against transformers, vLLM and the speed of memory.",
    "verify-curve": "Seconds of one forward of 1 to 64 rows, against transformers.",
    "batch": "Eight plain sessions at once against vLLM.",
    "gguf": "A GGUF file as it is, one plain session, against llama.cpp.",
    "overhead": "What a step takes outside the model, for 1, 8 and 32 sessions.",
    "tensor-parallel": "What a step costs on several ranks, and where the time goes.",
    "rank-faults": "From the loss of a rank to the next token, and until the group is back.",
    "prefix": "Time to the first token of a prompt that was there before.",
    "stall": "The longest gap of a running session while a long prompt comes in.",
    "lookup": "What a looked-up proposal costs at 32k tokens, and what is accepted of it.",
    "trees": "What verifying a tree costs, over one row and over a chain.",
    "speculation": "Tokens per second with speculation over without, in one run.",
    "drafter": "How much of a drafter's proposals is accepted, and what a token costs.",
    "end-to-end": "The same through all services, by category, beside transformers.",
    "probes": "Probes and grace periods of the chart, against real processes.",
    "autoscale": "The draft pool follows its load by the rules of HPA and KEDA.",
    "sweep": "No drafts, fixed lengths and the chosen one, with 1 to 32 sessions.",
}


class Benchmarks(click.Group):
    """The benchmarks, imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names."""
        return list(NAMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The benchmark of that name."""
        if cmd_name not in NAMES:
            return None
        module = importlib.import_module(f"bench.{cmd_name.replace('-', '_')}")
        built = command(module.Settings, module.run, name=cmd_name)
        built.short_help = NAMES[cmd_name]
        return built


if __name__ == "__main__":
    logs.configure("info", service="bench")
    try:
        Benchmarks(name="bench", help=__doc__)(prog_name="python -m bench")
    except OutriderError as error:
        sys.exit(f"bench: {error.message}")
