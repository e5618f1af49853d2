"""A drafter that counts, for tests of what is around it."""

from collections.abc import Sequence

from outrider.drafting.base import (
    PLAIN_LAW,
    DraftLaw,
    DraftRequest,
    HiddenStates,
    check_base_len,
)
from outrider.errors import InvalidRequestError
from outrider.messages import Draft, SamplingParams, Tensor


class CountingDrafter:
    """Proposes the numbers that follow the last token.

    Token 666 makes it raise whenever it is asked; a session that has 777 is never ready.
    """

    name = "counting"
    kv_blocks = (0, 0)
    reads: HiddenStates | None = None

    def __init__(self) -> None:
        self.held: dict[str, list[int]] = {}
        self.calls: list[list[DraftRequest]] = []

    def open(
        self,
        session_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        law: DraftLaw = PLAIN_LAW,
    ) -> None:
        if 999 in token_ids:
            raise InvalidRequestError("no 999")
        if 998 in token_ids:
            raise RuntimeError("broken")
        self.held[session_id] = list(token_ids)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        self.calls.append(list(requests))
        if any(666 in self.held[request.session_id] for request in requests):
            raise RuntimeError("poison")
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft | None:
        held = self.held[request.session_id]
        if 777 in held:
            return None
        return Draft(tuple(range(held[-1] + 1, held[-1] + 1 + request.draft_len)))

    def commit(
        self,
        session_id: str,
        base_len: int,
        token_ids: Sequence[int],
        hidden: Tensor | None = None,
    ) -> None:
        check_base_len(base_len, len(self.held[session_id]))
        self.held[session_id] += token_ids

    def close(self, session_id: str) -> None:
        self.held.pop(session_id, None)
