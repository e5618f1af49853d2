"""Streams that no coordinator should send: a clear error, and never a text that is wrong."""

from collections.abc import Sequence
from itertools import zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider._transcript import Transcript
from outrider._values import Chunk
from outrider.errors import InternalError
from outrider.pb.v1 import coordinator_pb2 as pb
from tests.support.fake_coordinator import delta, finished, started
from tests.support.random_messages import messages

SAMPLES = 2
# What each completion says; a token tells its place, so that none can stand for another.
TRUTH = [
    [(100 * index + at, f"<{index}.{at}>", 1) for at in range(1, 7)] for index in range(SAMPLES)
]


def true_stream(cuts: Sequence[Sequence[int]]) -> list[pb.GenerateResponse]:
    """All of it, each completion cut in places of its own, the pieces of both in turn."""
    said: list[pb.GenerateResponse] = []
    for index, cut in enumerate(cuts):
        at = 0
        for end in (*sorted({*cut}), len(TRUTH[index])):
            said.append(delta(at, *TRUTH[index][at:end], index=index))
            at = end
        said.append(finished(at, index=index))
    first = [one for one in said if index_of(one) == 0]
    second = [one for one in said if index_of(one) == 1]
    mixed = [one for pair in zip_longest(first, second) for one in pair if one is not None]
    return [started("s"), *mixed]


def index_of(said: pb.GenerateResponse) -> int:
    return said.finished.index if said.HasField("finished") else said.delta.index


def listen(
    said: Sequence[pb.GenerateResponse], n: int = SAMPLES
) -> tuple[Transcript, list[Chunk], bool]:
    """What was made of it, and whether an error ended it; any other error is a failure."""
    transcript = Transcript("s", n)
    chunks: list[Chunk] = []
    for one in said:
        try:
            chunk = transcript.feed(one)
        except InternalError:
            return transcript, chunks, True
        if chunk is not None:
            chunks.append(chunk)
    return transcript, chunks, False


CUTS = st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=SAMPLES, max_size=SAMPLES)


@st.composite
def spoilt_streams(draw: st.DrawFn) -> list[pb.GenerateResponse]:
    """A true stream with some of it lost, doubled, displaced, or with numbers that are wrong."""
    said = true_stream(draw(CUTS))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(1, len(said) - 1))
        match draw(st.sampled_from(["lost", "doubled", "displaced", "offset", "index"])):
            case "lost" if len(said) > 2:
                del said[at]
            case "doubled":
                said.insert(draw(st.integers(at, len(said))), said[at])
            case "displaced":
                one = said.pop(at)
                said.insert(draw(st.integers(1, len(said))), one)
            case "offset":
                one = pb.GenerateResponse()
                one.CopyFrom(said[at])
                if one.HasField("delta"):
                    one.delta.offset = draw(st.integers(0, 8) | st.just(2**32 - 1))
                    said[at] = one
            case "index":
                one = pb.GenerateResponse()
                one.CopyFrom(said[at])
                part = one.delta if one.HasField("delta") else one.finished
                part.index = draw(st.integers(SAMPLES, 2**32 - 1))
                said[at] = one
    return said


@given(cuts=CUTS)
@settings(max_examples=20, deadline=None)
def test_a_true_stream_is_told_whole(cuts: list[list[int]]) -> None:
    transcript, _, failed = listen(true_stream(cuts))
    assert not failed
    assert transcript.finished
    said = [[piece.token_id for piece in one.pieces] for one in transcript.completions()]
    assert said == [[token_id for token_id, _, _ in truth] for truth in TRUTH]


@given(said=spoilt_streams())
@settings(max_examples=150, deadline=None)
def test_what_a_spoilt_stream_says_is_true_as_far_as_it_goes(
    said: list[pb.GenerateResponse],
) -> None:
    transcript, _, _ = listen(said)
    for truth, one in zip(TRUTH, transcript.completions(), strict=True):
        ids = [piece.token_id for piece in one.pieces]
        assert ids == [token_id for token_id, _, _ in truth][: len(ids)]
        assert one.text == "".join(text for _, text, _ in truth[: len(ids)])


@given(said=st.lists(messages(pb.GenerateResponse), max_size=6))
@settings(max_examples=100, deadline=None)
def test_whatever_comes_is_taken_or_refused_with_an_error_of_ours(
    said: list[pb.GenerateResponse],
) -> None:
    for one in said:
        if one.HasField("started"):
            one.started.session_id = "s"
    transcript, chunks, _ = listen(said)
    for told in transcript.completions():
        own = [chunk for chunk in chunks if chunk.index == told.index]
        assert told.text == "".join(chunk.text for chunk in own)
        assert told.pieces == tuple(piece for chunk in own for piece in chunk.pieces)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([delta(1, (1, "a", 1))], "tokens at 1, expected them at 0"),
        ([delta(0, (1, "a", 1)), delta(0, (1, "a", 1))], "tokens at 0, expected them at 1"),
        ([delta(2**32 - 1, (1, "a", 1))], "tokens at 4294967295"),
        ([delta(0, (1, "a", 1), index=2)], "completion 2 of the 2"),
        ([finished(1, index=7)], "completion 7 of the 2"),
        ([delta(0, (1, "a", 1)), finished(1), delta(1, (2, "b", 1))], "tokens at 1, after the end"),
        ([started("s"), started("t")], "a stream of session 't' came instead"),
    ],
)
def test_each_kind_of_lie_has_its_words(said: list[pb.GenerateResponse], why: str) -> None:
    transcript = Transcript("s", 2)
    for one in said[:-1]:
        transcript.feed(one)
    with pytest.raises(InternalError, match=why):
        transcript.feed(said[-1])


def test_a_stream_from_the_start_that_ends_before_what_was_said() -> None:
    transcript = Transcript("s")
    transcript.feed(delta(0, (1, "a", 1), (2, "b", 1)))
    transcript.resume(from_start=True)
    assert transcript.feed(delta(0, (1, "a", 1))) is None
    with pytest.raises(InternalError, match="an end at 1, expected them at 2"):
        transcript.feed(finished(1))
