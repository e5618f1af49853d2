"""Where token ids alone end a session: stop ids and the token cap."""

from collections.abc import Sequence

from outrider.messages import Endings, FinishReason


def first_ending(
    token_ids: Sequence[int], new_tokens_before: int, endings: Endings
) -> tuple[int, FinishReason | None]:
    """How many of `token_ids` are kept, and why decoding ends after them, if it does.

    The first stop id is kept and ends the session. `new_tokens_before` counts the tokens
    that were committed after the prompt and before `token_ids`.
    """
    for kept, token in enumerate(token_ids, start=1):
        if token in endings.stop_ids:
            return kept, FinishReason.STOP
        if new_tokens_before + kept >= endings.max_new_tokens:
            return kept, FinishReason.LENGTH
    return len(token_ids), None
