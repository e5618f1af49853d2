"""How tokens and figures look on a terminal and in JSON."""

from typing import Any

import click

from outrider.client import Chunk, Completion
from outrider.messages import SpeculationFigures, TokenOrigin

STYLES: dict[TokenOrigin, dict[str, Any]] = {
    TokenOrigin.PLAIN: {},
    TokenOrigin.ACCEPTED: {"fg": "green"},
    TokenOrigin.RECOVERED: {"fg": "yellow"},
    TokenOrigin.BONUS: {"fg": "blue", "bold": True},
}
MEANINGS = {
    TokenOrigin.ACCEPTED: "accepted draft",
    TokenOrigin.RECOVERED: "recovered (the draft was wrong)",
    TokenOrigin.BONUS: "bonus (the whole draft was right)",
    TokenOrigin.PLAIN: "plain step",
}


def write_chunk(chunk: Chunk, *, color: bool) -> None:
    """Write what arrived, each token in the colour of its origin if that is wanted.

    click leaves the colours out when stdout is not a terminal.
    """
    if not color or not chunk.pieces:
        click.echo(chunk.text, nl=False)
        return
    for piece in chunk.pieces:
        style = STYLES[piece.origin]
        text = click.style(piece.text, **style) if style and piece.text else piece.text
        click.echo(text, nl=False)


def legend() -> str:
    """What the colours mean, in one line."""
    return "   ".join(click.style(text, **STYLES[origin]) for origin, text in MEANINGS.items())


def speculation_json(figures: SpeculationFigures) -> dict[str, Any]:
    """The figures with their rates."""
    return {
        "rounds": figures.rounds,
        "drafts": figures.drafts,
        "draft_tokens": figures.draft_tokens,
        "accepted_tokens": figures.accepted_tokens,
        "accepted_per_position": figures.accepted_per_position,
        "acceptance_rate": figures.acceptance_rate,
        "mean_acceptance_length": figures.mean_acceptance_length,
    }


def completion_json(completion: Completion) -> dict[str, Any]:
    """Everything that is known of a completion."""
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "usage": {
            "prompt_tokens": completion.usage.prompt_tokens,
            "completion_tokens": completion.usage.completion_tokens,
        },
        "speculation": speculation_json(completion.speculation),
        "timings": {
            "first_token_s": completion.timings.first_token_s,
            "total_s": completion.timings.total_s,
        },
        "model": completion.model,
        "session_id": completion.session_id,
        "seed": completion.seed,
    }


def speculation_line(figures: SpeculationFigures) -> str:
    """Rounds and acceptance, in one line."""
    if not figures.draft_tokens:
        return f"{figures.rounds} rounds, nothing drafted"
    return (
        f"{figures.rounds} rounds, acceptance rate {figures.acceptance_rate:.0%} "
        f"({figures.accepted_tokens} of {figures.draft_tokens}), "
        f"mean acceptance length {figures.mean_acceptance_length:.2f}"
    )


def summary_line(completion: Completion) -> str:
    """Tokens, speed and acceptance, in one line."""
    tokens, seconds = completion.usage.completion_tokens, completion.timings.total_s
    speed = f", {tokens / seconds:.1f} tokens/s" if seconds else ""
    return (
        f"{tokens} tokens in {seconds:.2f} s{speed}; {speculation_line(completion.speculation)}; "
        f"finished: {completion.finish_reason.value}; seed {completion.seed}"
    )
