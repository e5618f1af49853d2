"""What a completion has said so far, over all the streams that brought it; no input or output.

A stream that breaks is followed by another one, which goes on where the transcript ends, or
before that: pieces that are there already must be the same, and are not given again.
"""

from outrider import wire
from outrider._values import Chunk, Completion, GenerateTimings, Piece, Usage
from outrider.errors import InternalError
from outrider.figures import SpeculationFigures
from outrider.messages import FinishReason, TokenOrigin
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.sampling.seeds import derived_seed
from outrider.session.names import sample_id

MICROSECONDS = 1e6


class _Sample:
    """One of the completions of a call; `position` is where its present stream is."""

    def __init__(self, index: int) -> None:
        self.text: list[str] = []
        self.pieces: list[Piece] = []
        self.finished: pb.Finished | None = None
        self.position = 0
        self._index = index

    def continued(self, text: str, pieces: tuple[Piece, ...]) -> Chunk:
        """The chunk that comes next."""
        chunk = Chunk(len(self.pieces), text, pieces, self._index)
        self.text.append(text)
        self.pieces.extend(pieces)
        return chunk


class Transcript:
    """Folds the events of all streams for `n` completions.

    `begun` once any stream has said anything.
    """

    def __init__(self, session_id: str, n: int = 1) -> None:
        self.session_id = session_id
        self.n = n
        self.begun = False
        self._started = pb.Started()
        self._samples: dict[int, _Sample] = {}

    @property
    def offsets(self) -> list[int]:
        """Completion tokens that are there, by index of the completion."""
        samples = (self._samples.get(index) for index in range(self.n))
        return [len(sample.pieces) if sample else 0 for sample in samples]

    def resume(self, *, from_start: bool = False) -> None:
        """The next event is the first of a new stream, from `offsets` on or from the start."""
        for sample in self._samples.values():
            sample.position = 0 if from_start else len(sample.pieces)

    @property
    def finished(self) -> bool:
        """Whether the coordinator has said how every completion ended."""
        ended = sum(sample.finished is not None for sample in self._samples.values())
        return ended == self.n

    @property
    def prompt_text(self) -> str:
        """The prompt that was sent back; empty before the first chunk, or without `echo`."""
        return self._started.prompt_text

    def feed(self, response: pb.GenerateResponse) -> Chunk | None:
        """Take the next event; the chunk that it brought, if it brought any.

        Raises:
            InternalError: a delta is not the continuation of the one before, or says other
                tokens than an earlier stream, or comes after the end; or the stream is of another
                session.
        """
        match response.WhichOneof("event"):
            case "started":
                self._start(response.started)
                return None
            case "delta":
                self.begun = True
                return self._continue(response.delta)
            case "finished":
                self.begun = True
                sample = self._sample(response.finished.index)
                if sample.finished is not None:
                    return None  # an earlier stream has said so
                if sample.position != len(sample.pieces):
                    raise self._misfit(sample.position, len(sample.pieces), "an end")
                sample.finished = response.finished
                text = response.finished.text
                return sample.continued(text, ()) if text else None
            case _:  # an event of a newer coordinator
                return None

    def completions(self) -> list[Completion]:
        """All of it; a completion without a word on its end counts as cancelled by the caller."""
        return [self._completion(index) for index in range(self.n)]

    def _sample(self, index: int) -> _Sample:
        if index >= self.n:
            raise InternalError(
                f"session {self.session_id}: got completion {index} of the {self.n} asked for"
            )
        return self._samples.setdefault(index, _Sample(index))

    def _start(self, started: pb.Started) -> None:
        known = self._started.session_id
        if known and started.session_id != known:
            raise InternalError(
                f"session {known}: a stream of session {started.session_id[:140]!r} came instead"
            )
        if not known:
            self._started = started
        self.begun = True
        self.session_id = started.session_id

    def _continue(self, delta: pb.Delta) -> Chunk | None:
        sample = self._sample(delta.index)
        if delta.offset != sample.position:
            raise self._misfit(delta.offset, sample.position, "tokens")
        known = sample.pieces[sample.position : sample.position + len(delta.pieces)]
        for piece, again in zip(known, delta.pieces, strict=False):
            if piece.token_id != again.token_id:
                raise InternalError(
                    f"session {self.session_id} was lost and made again from its start, and its "
                    f"token {sample.position} is another one than before; only the coupled rule "
                    "gives the same tokens again"
                )
            sample.position += 1
        pieces = tuple(_piece(piece) for piece in delta.pieces[len(known) :])
        if pieces and sample.finished is not None:
            raise InternalError(
                f"session {self.session_id}: got tokens at {sample.position}, after the end"
            )
        sample.position += len(pieces)
        if known and not pieces:
            return None
        return sample.continued("".join(piece.text for piece in pieces), pieces)

    def _misfit(self, got: int, expected: int, what: str) -> InternalError:
        return InternalError(
            f"session {self.session_id}: got {what} at {got}, expected them at {expected}"
        )

    def _completion(self, index: int) -> Completion:
        sample, started = self._sample(index), self._started
        end = sample.finished
        reason = FinishReason.CANCELLED
        usage = Usage(started.prompt_tokens, len(sample.pieces))
        figures, timings = SpeculationFigures(), GenerateTimings()
        if end is not None:
            reason = wire.FINISH_REASONS_FROM_PB.get(end.reason, FinishReason.ERROR)
            usage = Usage(
                end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_tokens
            )
            figures = wire.figures_from_pb(end.speculation)
            timings = GenerateTimings(
                end.timings.first_token_us / MICROSECONDS, end.timings.total_us / MICROSECONDS
            )
        return Completion(
            session_id=sample_id(self.session_id, index),
            model=started.model,
            seed=derived_seed(started.seed, index),
            text="".join(sample.text),
            pieces=tuple(sample.pieces),
            finish_reason=reason,
            usage=usage,
            speculation=figures,
            timings=timings,
            index=index,
            prompt_text=started.prompt_text,
            prompt_token_ids=tuple(started.prompt_token_ids),
        )


def _piece(pb_piece: pb.Piece) -> Piece:
    return Piece(
        pb_piece.token_id,
        pb_piece.text,
        wire.TOKEN_ORIGINS_FROM_PB.get(pb_piece.origin, TokenOrigin.PLAIN),
        wire.logprobs_from_pb(pb_piece.logprobs) if pb_piece.HasField("logprobs") else None,
    )
