"""Where the processes of ranks begin: with everything imported. Itself it imports nothing large."""

import multiprocessing
from multiprocessing import forkserver
from typing import Any

# What is imported late, each time anew if not before the processes begin.
_LATE = [
    "outrider.model.compiled.decoder",
    *(
        f"transformers.models.{family}.modeling_{family}"
        for family in ("llama", "qwen3", "gemma2", "gpt_neox")
    ),
]


def context() -> Any:
    """Processes that begin with everything imported."""
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload(["tests.support.ranks", *_LATE])
    return chosen


def begin() -> None:
    """Start importing now, beside this process, which has no rank to start yet."""
    context()
    forkserver.ensure_running()
