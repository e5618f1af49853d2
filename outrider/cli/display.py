"""How tokens and figures look on a terminal and in JSON."""

from typing import Any

import click

from outrider.client import Chunk, Completion, Piece, TokenLogprobs
from outrider.figures import SpeculationFigures
from outrider.messages import TokenOrigin

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
        _write_piece(piece)


def write_completion(completion: Completion, *, color: bool) -> None:
    """Write a whole completion as `write_chunk` would have."""
    if not color:
        click.echo(completion.text, nl=False)
        return
    for piece in completion.pieces:
        _write_piece(piece)
    held_back = completion.text[sum(len(piece.text) for piece in completion.pieces) :]
    click.echo(held_back, nl=False)


def _write_piece(piece: Piece) -> None:
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
    return _choice_json(completion) | _prompt_json(completion) | {"model": completion.model}


def completions_json(completions: list[Completion]) -> dict[str, Any]:
    """Everything that is known of the completions of one prompt; there is at least one."""
    first = completions[0]
    return _prompt_json(first) | {
        "choices": [{"index": c.index} | _choice_json(c) for c in completions],
        "usage": {
            "prompt_tokens": first.usage.prompt_tokens,
            "completion_tokens": sum(c.usage.completion_tokens for c in completions),
            "cached_tokens": first.usage.cached_tokens,
        },
        "model": first.model,
        "session_id": first.session_id,
        "seed": first.seed,
    }


def _choice_json(completion: Completion) -> dict[str, Any]:
    found = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "usage": {
            "prompt_tokens": completion.usage.prompt_tokens,
            "completion_tokens": completion.usage.completion_tokens,
            "cached_tokens": completion.usage.cached_tokens,
        },
        "speculation": speculation_json(completion.speculation),
        "timings": {
            "first_token_s": completion.timings.first_token_s,
            "total_s": completion.timings.total_s,
        },
        "session_id": completion.session_id,
        "seed": completion.seed,
    }
    if completion.logprobs:
        found["logprobs"] = [_logprobs_json(entry) for entry in completion.logprobs]
    return found


def _prompt_json(completion: Completion) -> dict[str, Any]:
    if not completion.prompt_token_ids:
        return {}
    return {
        "prompt_text": completion.prompt_text,
        "prompt_token_ids": list(completion.prompt_token_ids),
    }


def _logprobs_json(entry: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in entry.top]
    return {"logprob": entry.logprob, "top": top}


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
