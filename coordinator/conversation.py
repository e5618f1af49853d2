"""Prompts that continue a session which has finished."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import InvalidRequestError
from outrider.session.record import ChatMessage


@dataclass(frozen=True, slots=True)
class Previous:
    """A session that has finished: all its tokens, and what was said if it was a conversation.

    `messages` are those of its prompt, `answer` is the text of its completion.
    """

    session_id: str
    token_ids: tuple[int, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    answer: str = ""

    def conversation(self, more: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
        """All that was said, then `more`.

        Raises:
            InvalidRequestError: it was no conversation.
        """
        if not self.messages:
            raise InvalidRequestError(
                f"session {self.session_id!r} was not begun with messages, so it can't be "
                "continued with some; give text or token_ids"
            )
        return (*self.messages, ("assistant", self.answer), *more)
