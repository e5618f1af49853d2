"""What one `Generate` call has said so far, without any input or output."""

from outrider import wire
from outrider._values import Chunk, Completion, GenerateTimings, Piece, Usage
from outrider.errors import InternalError
from outrider.messages import FinishReason, SpeculationFigures, TokenOrigin
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.sampling.seeds import derived_seed
from outrider.session.names import sample_id

MICROSECONDS = 1e6


class _Sample:
    """One of the completions of a call."""

    def __init__(self, index: int) -> None:
        self.text: list[str] = []
        self.pieces: list[Piece] = []
        self.finished: pb.Finished | None = None
        self._index = index

    def continued(self, text: str, pieces: tuple[Piece, ...]) -> Chunk:
        """The chunk that comes next."""
        chunk = Chunk(len(self.pieces), text, pieces, self._index)
        self.text.append(text)
        self.pieces.extend(pieces)
        return chunk


class Transcript:
    """Folds the events of a call for `n` completions; `begun` once it has said anything."""

    def __init__(self, session_id: str, n: int = 1) -> None:
        self.session_id = session_id
        self.n = n
        self.begun = False
        self._started = pb.Started()
        self._samples: dict[int, _Sample] = {}

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
            InternalError: a delta is not the continuation of the one before.
        """
        self.begun = True
        match response.WhichOneof("event"):
            case "started":
                self._started = response.started
                self.session_id = response.started.session_id
                return None
            case "delta":
                return self._continue(response.delta)
            case "finished":
                sample = self._sample(response.finished.index)
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

    def _continue(self, delta: pb.Delta) -> Chunk:
        sample = self._sample(delta.index)
        if delta.offset != len(sample.pieces):
            raise InternalError(
                f"session {self.session_id}: got tokens at {delta.offset}, "
                f"expected them at {len(sample.pieces)}"
            )
        pieces = tuple(_piece(piece) for piece in delta.pieces)
        return sample.continued("".join(piece.text for piece in pieces), pieces)

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
