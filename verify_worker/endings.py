"""How long a session can become, checked when it is started."""

from outrider.errors import InvalidRequestError
from outrider.messages import Endings, StartSession


def checked_endings(
    command: StartSession, *, context_len: int, vocab_size: int, kv_tokens: int
) -> Endings:
    """The endings within the context, where this worker has KV for `kv_tokens` tokens.

    Raises:
        InvalidRequestError: prompt and completion can't be served here.
    """
    prompt, context = command.prompt_len, context_len
    if len(command.token_ids) > context:
        raise InvalidRequestError(f"the prompt has {prompt} tokens, the context holds {context}")
    if any(not 0 <= token < vocab_size for token in command.token_ids):
        raise InvalidRequestError(f"a token id is not within the vocabulary of {vocab_size}")
    cap = min(command.endings.max_new_tokens, context - prompt)
    # The last committed token needs no KV.
    needed = prompt + cap - 1
    if needed > kv_tokens:
        raise InvalidRequestError(
            f"prompt and completion need KV for {needed} tokens, the pool of this worker "
            f"holds {kv_tokens}: ask for fewer tokens, or give the worker more --kv-memory"
        )
    return Endings(cap, command.endings.stop_ids)
