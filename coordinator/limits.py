"""How large a request may be; checked before anything is made of it.

Everything here is counted without reading what it says, so a request that is far too large
costs no more than its bytes did.
"""

from collections.abc import Sized

from coordinator.model import ServedModel
from outrider.errors import InvalidRequestError
from outrider.pb.v1 import coordinator_pb2

# Far more than a long context takes; a text of it is tokenized in a few seconds.
MAX_PROMPT_BYTES = 4 * 1024 * 1024
MAX_MESSAGES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
MAX_SAMPLES = 16
# Names that clients choose, and those that are derived from them for samples.
MAX_NAME_CHARS = 160
# The message of a client as a whole, beside which nothing of the above is near.
CLIENT_MESSAGE_BYTES = 16 * 1024 * 1024


def check_sizes(request: coordinator_pb2.GenerateRequest, model: ServedModel) -> None:
    """Refuse a request of which a part is too large.

    Raises:
        InvalidRequestError: the message says which part, and how large it may be.
    """
    check_name("model", request.model)
    _check_prompt(request, model)
    _check_count("stop strings", request.stop, MAX_STOP_STRINGS)
    for text in request.stop:
        if len(text) > MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"a stop string has at most {MAX_STOP_CHARS} characters, not {len(text)}"
            )
    _check_count("stop_token_ids", request.stop_token_ids, MAX_STOP_IDS)
    # Twice each id is already strange, and harmless.
    most_ids = 2 * model.vocab_size
    _check_count("allowed_token_ids", request.allowed_token_ids, most_ids)
    _check_count("banned_token_ids", request.banned_token_ids, most_ids)


def check_name(what: str, name: str) -> None:
    """Refuse a name that is longer than any of ours, so that it is neither kept nor repeated."""
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRequestError(
            f"{what} {name[:32]!r}... has {len(name)} characters, and may have {MAX_NAME_CHARS}"
        )


def check_offsets(request: coordinator_pb2.ResumeRequest) -> None:
    """Refuse to resume with a name or offsets that no request of ours has."""
    check_name("session_id", request.session_id)
    _check_count("offsets", request.offsets, MAX_SAMPLES)


def _check_prompt(request: coordinator_pb2.GenerateRequest, model: ServedModel) -> None:
    match request.WhichOneof("prompt"):
        case "text":
            size = len(request.text.encode())
        case "messages":
            messages = request.messages.messages
            _check_count("messages", messages, MAX_MESSAGES)
            size = sum(len(m.role.encode()) + len(m.content.encode()) for m in messages)
        case _:
            _check_count("prompt token ids", request.token_ids.ids, model.context_len)
            return
    if size > MAX_PROMPT_BYTES:
        raise InvalidRequestError(
            f"the prompt has {size} bytes; at most {MAX_PROMPT_BYTES} are taken, shorten it"
        )


def _check_count(what: str, given: Sized, most: int) -> None:
    if len(given) > most:
        raise InvalidRequestError(f"at most {most} {what} are taken, not {len(given)}")
