"""What a record and its log make again of a session: the commit step, and what it had said."""

from collections.abc import Sequence

from coordinator.commit import CommitStep, Limits, Piece
from coordinator.conversation import Previous
from coordinator.detokenizer import Detokenizer
from coordinator.model import ServedModel
from coordinator.requests import ending_ids
from coordinator.session import RunningSession
from outrider.errors import InvalidRequestError, UnavailableError, UnknownModelError
from outrider.messages import AcceptanceRule
from outrider.session.record import SessionRecord, SessionState, StoredSession


def commit_step(model: ServedModel, record: SessionRecord) -> tuple[CommitStep, frozenset[int]]:
    """The commit step of a session and the ids that end it; the record says all of it."""
    stop_ids = ending_ids(model, record.stop_ids, ignore_eos=record.ignore_eos)
    commit = CommitStep(
        Detokenizer(model.vocabulary),
        limits=Limits(record.prompt_len, record.max_tokens, model.context_len),
        stop_ids=stop_ids,
        stop=record.stop,
        include_stop=record.include_stop,
    )
    return commit, stop_ids


def restore(commit: CommitStep, stored: StoredSession) -> list[Piece]:
    """Bring a new commit step to where the session is; gives the pieces up to there."""
    record = stored.record
    pieces = commit.replay(stored.token_ids[record.prompt_len :], stored.logprobs)
    commit.figures = stored.figures
    commit.cached_tokens = stored.cached_tokens
    if record.finish_reason is not None:
        commit.end(record.finish_reason)
    return pieces


def check_can_go_on(session: RunningSession, model: ServedModel, have: int) -> None:
    """Refuse a session that can't go on here for a client that has `have` of its tokens.

    Raises:
        UnknownModelError: it is of another model.
        UnavailableError: the log lacks tokens which would come out differently.
    """
    record = session.journal.record
    if record.model != model.name:
        raise UnknownModelError(
            f"session {record.session_id!r} is of model {record.model!r}, which is not served "
            f"here; served: {model.name!r}"
        )
    logged = len(session.commit.token_ids)
    by_chance = record.sampling.temperature > 0
    rejects = record.speculation.rule is AcceptanceRule.REJECTION and by_chance
    if have > logged and session.commit.finish_reason is None and rejects:
        raise UnavailableError(
            f"the log of session {record.session_id!r} has {logged} tokens and its client {have}; "
            "under the rejection rule the missing ones can't be made again. The coordinator that "
            "ran it may still write them"
        )


def as_previous(model: ServedModel, record: SessionRecord, token_ids: Sequence[int]) -> Previous:
    """A session that has finished, to be continued.

    Raises:
        InvalidRequestError: it has not finished, or it failed, or it is of another model.
    """
    if record.model != model.name:
        raise InvalidRequestError(
            f"session {record.session_id!r} is of model {record.model!r}, not of {model.name!r}"
        )
    if record.state is not SessionState.FINISHED or record.failure is not None:
        raise InvalidRequestError(
            f"session {record.session_id!r} can't be continued: it is {record.state.value} and "
            "has not ended well; let it finish first"
        )
    commit, _ = commit_step(model, record)
    pieces = commit.replay(token_ids[record.prompt_len :])
    answer = "".join(piece.text for piece in pieces) + commit.flush()
    return Previous(record.session_id, tuple(token_ids), record.messages, answer)
