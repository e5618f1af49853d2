"""What every drafter does, wherever it lives.

A drafter follows the committed tokens of many sessions and proposes what may come next. It
knows nothing of streams, epochs or gRPC: today it sits in a draft worker, and it can sit
inside a verify worker just as well. A drafter is used by one thread at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.errors import FencedError, InvalidRequestError
from outrider.messages import FREE, AcceptanceRule, Draft, Price, SamplingParams, Tensor

MAX_TOKEN_ID = 2**32 - 1


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Propose up to `draft_len` tokens after everything committed; 0 only prepares for it.

    A tree may have that many levels. With a `price` a drafter that knows how likely its tokens
    are leaves out those that are not worth it.
    """

    session_id: str
    draft_len: int
    price: Price = FREE


@dataclass(frozen=True, slots=True)
class DraftLaw:
    """What a drafter is told of how its drafts are judged.

    `prompt_len` and `stop_ids` serve the penalties and `min_tokens` of the sampling
    parameters. Under the rejection rule a drafter that chooses by chance samples from its own
    distribution q and reports it, `q_top` tokens of it (0: all). A draft may be a tree of up to
    `max_nodes` tokens; 0 asks for chains. A session may be drafted from what others of its
    `corpus` said; an empty one has no others.
    """

    prompt_len: int = 0
    stop_ids: frozenset[int] = frozenset()
    rule: AcceptanceRule = AcceptanceRule.COUPLED
    q_top: int = 0
    max_nodes: int = 0
    corpus: str = ""


PLAIN_LAW = DraftLaw()


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Which hidden states of the target a drafter reads: `size` numbers a token, of a `layer`.

    The number of the target's layers stands for what its head is given.
    """

    layer: int
    size: int


class Drafter(Protocol):
    """Proposes tokens for many sessions at once.

    A call that raises leaves every session as it was, so that the caller can ask again
    without the session that caused it. What was proposed binds nobody: only `commit` says
    how a session went on.
    """

    @property
    def name(self) -> str:
        """How people call this drafter: "ngram", or the name of its model."""

    @property
    def kv_blocks(self) -> tuple[int, int]:
        """KV blocks that are free, and all of them; (0, 0) for a drafter without KV."""

    @property
    def reads(self) -> HiddenStates | None:
        """The hidden states that it wants with every `commit`; None for most drafters."""

    def open(
        self,
        session_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        law: DraftLaw = PLAIN_LAW,
    ) -> None:
        """Follow a session from its committed tokens; an id that is open begins again.

        Raises:
            InvalidRequestError: the drafter can't work with these tokens.
        """

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """One answer a request, in their order.

        A draft can be shorter than asked, or empty. None says that the drafter has not caught
        up with the session yet and wants to be asked again; requests that come first are
        served first, and asking again always comes to an end. A session can be asked for
        once in a call.

        Raises:
            UnknownSessionError: a session is not open.
        """

    def commit(
        self,
        session_id: str,
        base_len: int,
        token_ids: Sequence[int],
        hidden: Tensor | None = None,
    ) -> None:
        """The target committed `token_ids` after the first `base_len` tokens.

        `hidden` [len(token_ids), size] are the states that it made each of them of, as `reads`
        wants them. They are a help that may be missing at any time.

        Raises:
            UnknownSessionError: the session is not open.
            FencedError: `base_len` is not the number of tokens held.
            InvalidRequestError: the drafter can't work with these tokens.
        """

    def close(self, session_id: str) -> None:
        """Forget the session; one that is not open is no error."""


def check_base_len(base_len: int, held: int) -> None:
    """Refuse a commit that does not continue the `held` tokens."""
    if base_len != held:
        raise FencedError(f"commit at {base_len} tokens, but {held} are held here")


def check_token_ids(token_ids: Sequence[int], vocab_size: int = MAX_TOKEN_ID + 1) -> None:
    """Refuse ids outside of 0 .. vocab_size - 1."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(f"token id {wrong} is outside of the vocabulary of {vocab_size}")
