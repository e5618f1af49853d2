"""What a session's draft worker is told: everything, but no sooner than it is of use.

A message costs both sides time that the target may need, so a draft worker that is asked for
nothing hears nothing: what was committed meanwhile goes with the next question, at the latest
after `MOST_UNTOLD` tokens or with the end of the session.
"""

from dataclasses import dataclass

from outrider.messages import FREE, CloseDraft, CommitDraft, OpenDraft, Price, Tensor
from verify_worker.malformed import DraftShape
from verify_worker.state import Output, Session, ToDrafter, Told

# A drafter that is asked again can be expected to have little to catch up with.
MOST_UNTOLD = 32


@dataclass(frozen=True, slots=True)
class DraftCommands:
    """The commands to draft workers; those of a session are in order.

    `layers` of the target: its number stands for what the head is given. 0: unknown. `corpus`
    names the target where sessions may be drafted from each other's outputs.
    """

    shape: DraftShape
    q_top: int
    layers: int = 0
    corpus: str = ""

    def open(self, session: Session) -> list[Output]:
        """Begin, or begin again, with all tokens; the drafter may read them at once."""
        if session.drafter is None:
            return []
        session.told = Told(len(session.tokens))
        return [ToDrafter(session.drafter, self._opening(session, len(session.tokens)))]

    def commit(
        self,
        session: Session,
        committed: int,
        hidden: Tensor | None,
        *,
        draft_len: int = 0,
        price: Price = FREE,
    ) -> list[Output]:
        """The last `committed` tokens are new; ask for `draft_len` tokens after them."""
        if session.drafter is None:
            return []
        told = session.told
        told.hidden.append(hidden)
        if not draft_len and len(session.tokens) - told.tokens < MOST_UNTOLD:
            return []
        if not told.tokens and not draft_len:
            # Not worth opening yet.
            told.hidden.clear()
            return []
        outputs: list[Output] = []
        if not told.tokens:
            told.tokens = len(session.tokens) - committed
            told.hidden = [hidden]
            outputs.append(ToDrafter(session.drafter, self._opening(session, told.tokens)))
        return [*outputs, *self._rest(session, draft_len, price)]

    def close(self, session: Session) -> list[Output]:
        """The session is over; where others may learn from its text, that is told whole."""
        if session.drafter is None:
            return []
        outputs: list[Output] = []
        if self.corpus:
            # Nobody drafts any more.
            session.told.hidden.clear()
            if not session.told.tokens:
                outputs += self.open(session)
            elif session.told.tokens < len(session.tokens):
                outputs += self._rest(session, 0, FREE)
        elif not session.told.tokens:
            return []
        close = CloseDraft(session_id=session.session_id, epoch=session.epoch)
        return [*outputs, ToDrafter(session.drafter, close)]

    def _opening(self, session: Session, tokens: int) -> OpenDraft:
        return OpenDraft(
            session_id=session.session_id,
            epoch=session.epoch,
            token_ids=tuple(session.tokens[:tokens]),
            sampling=session.sampling,
            prompt_len=session.prompt_len,
            stop_ids=session.endings.stop_ids,
            rule=session.rule,
            q_top=self.q_top,
            max_nodes=self.shape.max_nodes,
            traceparent=session.traceparent,
            corpus=_corpus_of(self.corpus, session.tenant),
        )

    def _rest(self, session: Session, draft_len: int, price: Price) -> list[Output]:
        """A commit of all that was not told yet."""
        if session.drafter is None:
            return []
        told, session.told = session.told, Told(len(session.tokens))
        hidden = _joined(told.hidden)
        commit = CommitDraft(
            session_id=session.session_id,
            epoch=session.epoch,
            base_len=told.tokens,
            token_ids=tuple(session.tokens[told.tokens :]),
            draft_len=draft_len,
            price=price,
            features=() if hidden is None else ((self.layers, hidden),),
        )
        return [ToDrafter(session.drafter, commit)]


def _joined(rounds: list[Tensor | None]) -> Tensor | None:
    """Hidden states one after the other; None where some are missing."""
    known = [hidden for hidden in rounds if hidden is not None]
    if not known or len(known) < len(rounds):
        return None
    rows = sum(hidden.shape[0] for hidden in known)
    data = b"".join(hidden.data for hidden in known)
    return Tensor(known[0].dtype, (rows, *known[0].shape[1:]), data)


def _corpus_of(model: str, tenant: str) -> str:
    """Names the outputs of one tenant at one model; empty where the model has no name.

    No tenant's name has a slash, so that no two pairs make one word.
    """
    return f"{model}/{tenant}" if model else ""
