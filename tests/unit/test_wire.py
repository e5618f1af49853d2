"""Every message survives the wire; what can't be a message of ours is refused."""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import messages as m
from outrider import wire
from outrider.errors import InvalidRequestError, OutriderError, error_types
from outrider.figures import SpeculationFigures
from outrider.pb.v1 import draft_pb2, types_pb2, verify_pb2

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
IDS = st.lists(U32, max_size=8).map(tuple)
TEXT = st.text(max_size=12)
NAMED = {"session_id": TEXT, "epoch": U64}
SAMPLING = st.builds(m.SamplingParams, st.floats(0, 100), U32, st.floats(0, 1), U64)
SPECULATION = st.builds(m.SpeculationOptions, st.booleans(), U32, auto_draft_len=st.booleans())
WORKER = st.none() | st.builds(m.DraftWorkerRef, st.text(min_size=1, max_size=9), TEXT)
TIMINGS = st.builds(m.Timings, U64, U64, U32)
KINDS = [kind for kind in error_types().values() if kind.__module__ == "outrider.errors"]
ERRORS = st.builds(
    lambda kind, text: kind(text), st.sampled_from(KINDS), st.text(min_size=1, max_size=9)
)
FLOAT = st.floats(0, 1e6, width=32)
FIGURES = st.builds(SpeculationFigures, U64, U64, U64, U64, st.lists(U64, max_size=4))


@st.composite
def starts(draw: st.DrawFn) -> m.StartSession:
    tokens = draw(st.lists(U32, min_size=1, max_size=8).map(tuple))
    return m.StartSession(
        session_id=draw(TEXT),
        epoch=draw(U64),
        token_ids=tokens,
        prompt_len=draw(st.integers(1, len(tokens))),
        sampling=draw(SAMPLING),
        endings=m.Endings(draw(U32), frozenset(draw(st.sets(U32, max_size=4)))),
        speculation=draw(SPECULATION),
        drafter=draw(WORKER),
        traceparent=draw(TEXT),
        tenant=draw(TEXT),
    )


@st.composite
def progresses(draw: st.DrawFn) -> m.Progress:
    tokens = draw(IDS)
    origins = st.lists(
        st.sampled_from(m.TokenOrigin), min_size=len(tokens), max_size=len(tokens)
    ).map(tuple)
    return m.Progress(
        session_id=draw(TEXT),
        epoch=draw(U64),
        base_len=draw(U64),
        token_ids=tokens,
        origins=draw(origins),
        draft_tokens=draw(U32),
        timings=draw(TIMINGS),
        cached_tokens=draw(U64),
    )


@st.composite
def drafts(draw: st.DrawFn) -> m.Draft:
    tokens = draw(IDS)
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(len(tokens)))
    weighted = st.lists(st.tuples(U32, U32), max_size=4)
    q = tuple(
        m.SparseDistribution(tuple(i for i, _ in pairs), tuple(w for _, w in pairs))
        for pairs in (draw(weighted) for _ in tokens)
    )
    return m.Draft(
        tokens,
        parents if draw(st.booleans()) else (),
        q if draw(st.booleans()) else (),
        priced=draw(st.booleans()),
    )


@st.composite
def tensors(draw: st.DrawFn) -> m.Tensor:
    dtype = draw(st.sampled_from(sorted(wire.DTYPE_BYTES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3).map(tuple))
    size = wire.DTYPE_BYTES[dtype]
    for extent in shape:
        size *= extent
    return m.Tensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


FEATURES = st.lists(st.tuples(U32, tensors()), max_size=2).map(tuple)
CODECS: dict[type[object], tuple[Callable[..., Message], Callable[..., Any], Any]] = {
    kind: (wire.decode_command_to_pb, wire.decode_command_from_pb, values)
    for kind, values in {
        m.StartSession: starts(),
        m.CloseSession: st.builds(m.CloseSession, **NAMED),
        m.AssignDrafter: st.builds(m.AssignDrafter, **NAMED, drafter=WORKER),
    }.items()
}
CODECS |= {
    kind: (wire.decode_event_to_pb, wire.decode_event_from_pb, values)
    for kind, values in {
        m.Progress: progresses(),
        m.SessionEnded: st.builds(m.SessionEnded, **NAMED, reason=st.sampled_from(m.FinishReason)),
        m.SessionFailed: st.builds(m.SessionFailed, **NAMED, error=ERRORS),
        m.DrafterLost: st.builds(m.DrafterLost, **NAMED, worker_id=TEXT, error=ERRORS),
    }.items()
}
CODECS |= {
    kind: (wire.draft_command_to_pb, wire.draft_command_from_pb, values)
    for kind, values in {
        m.OpenDraft: st.builds(
            m.OpenDraft,
            **NAMED,
            token_ids=IDS,
            sampling=SAMPLING,
            draft_len=U32,
            max_nodes=U32,
            traceparent=TEXT,
            corpus=TEXT,
        ),
        m.CommitDraft: st.builds(
            m.CommitDraft,
            **NAMED,
            base_len=U64,
            token_ids=IDS,
            draft_len=U32,
            features=FEATURES,
            price=st.builds(m.Price, FLOAT, FLOAT),
        ),
        m.CloseDraft: st.builds(m.CloseDraft, **NAMED),
    }.items()
}
CODECS |= {
    kind: (wire.draft_event_to_pb, wire.draft_event_from_pb, values)
    for kind, values in {
        m.Proposal: st.builds(
            m.Proposal,
            **NAMED,
            base_len=U64,
            draft=drafts(),
            timings=TIMINGS,
            draft_us=U64,
            feature_layers=IDS,
        ),
        m.DraftFailed: st.builds(m.DraftFailed, **NAMED, error=ERRORS),
    }.items()
}


def comparable(value: object) -> object:
    """Errors are equal when their kind and message are."""
    if isinstance(value, OutriderError):
        return type(value), value.message
    if isinstance(value, m.SessionMessage):
        fields = type(value).__dataclass_fields__
        return type(value), [comparable(getattr(value, name)) for name in fields]
    return value


def test_every_message_has_a_codec() -> None:
    declared = {
        kind
        for kind in vars(m).values()
        if isinstance(kind, type) and issubclass(kind, m.SessionMessage)
    } - {m.SessionMessage}
    assert set(CODECS) == declared


@pytest.mark.parametrize("kind", CODECS, ids=lambda kind: kind.__name__)
@settings(deadline=None)
@given(data=st.data())
def test_round_trip(kind: type[object], data: st.DataObject) -> None:
    to_pb, from_pb, values = CODECS[kind]
    value = data.draw(values)
    encoded = to_pb(value)
    decoded = type(encoded).FromString(encoded.SerializeToString())
    assert comparable(from_pb(decoded)) == comparable(value)


@settings(deadline=None)
@given(FIGURES)
def test_figures_round_trip(figures: SpeculationFigures) -> None:
    assert wire.figures_from_pb(wire.figures_to_pb(figures)) == figures


@pytest.mark.parametrize(
    ("table", "enum", "kind"),
    [
        (wire.FINISH_REASONS, types_pb2.FinishReason, m.FinishReason),
        (wire.TOKEN_ORIGINS, types_pb2.TokenOrigin, m.TokenOrigin),
        (wire.DTYPES, types_pb2.TensorDtype, None),
    ],
)
def test_tables_are_complete(table: dict[object, int], enum: Any, kind: Any) -> None:
    assert set(table.values()) | {0} == set(enum.values())
    assert kind is None or set(table) == set(kind)


def test_an_unspecified_speculation_mode_is_on() -> None:
    assert wire.speculation_from_pb(types_pb2.SpeculationOptions()).enabled


@pytest.mark.parametrize(
    "draft",
    [
        types_pb2.Draft(token_ids=[1, 2], parents=[-1]),
        types_pb2.Draft(token_ids=[1], parents=[-1, 0]),
        types_pb2.Draft(token_ids=[1, 2], parents=[-1, 1]),
        types_pb2.Draft(token_ids=[1, 2], parents=[1, -1]),
        types_pb2.Draft(token_ids=[1], parents=[-2]),
        types_pb2.Draft(token_ids=[1, 2], q=[types_pb2.SparseDistribution()]),
        types_pb2.Draft(token_ids=[1], q=[types_pb2.SparseDistribution(token_ids=[1])]),
    ],
)
def test_drafts_of_a_wrong_shape_are_refused(draft: types_pb2.Draft) -> None:
    event = draft_pb2.DraftEvent(session_id="s", proposal=draft_pb2.Proposal(draft=draft))
    with pytest.raises(InvalidRequestError, match="draft"):
        wire.draft_event_from_pb(event)


@pytest.mark.parametrize(
    ("decode", "pb"),
    [
        (wire.decode_command_from_pb, verify_pb2.DecodeCommand(session_id="s")),
        (wire.decode_event_from_pb, verify_pb2.DecodeEvent(session_id="s")),
        (wire.draft_command_from_pb, draft_pb2.DraftCommand(session_id="s")),
        (wire.draft_event_from_pb, draft_pb2.DraftEvent(session_id="s")),
        (
            wire.decode_command_from_pb,
            verify_pb2.DecodeCommand(start=verify_pb2.StartSession(token_ids=[1], prompt_len=2)),
        ),
        (
            wire.decode_command_from_pb,
            verify_pb2.DecodeCommand(start=verify_pb2.StartSession(token_ids=[1])),
        ),
        (
            wire.decode_event_from_pb,
            verify_pb2.DecodeEvent(progress=verify_pb2.Progress(token_ids=[1, 2], origins=[1])),
        ),
        (
            wire.decode_event_from_pb,
            verify_pb2.DecodeEvent(progress=verify_pb2.Progress(token_ids=[1], origins=[0])),
        ),
        (
            wire.decode_event_from_pb,
            verify_pb2.DecodeEvent(ended=verify_pb2.SessionEnded()),
        ),
        (wire.tensor_from_pb, types_pb2.Tensor(shape=[1], data=b"1234")),
        (wire.tensor_from_pb, types_pb2.Tensor(dtype=1, shape=[2], data=b"1234")),
    ],
)
def test_what_can_not_be_ours_is_refused(decode: Callable[..., object], pb: Message) -> None:
    with pytest.raises(InvalidRequestError):
        decode(pb)


def test_an_unknown_error_reason_falls_back_on_the_code() -> None:
    error = wire.error_from_pb(types_pb2.ItemError(code=14, reason="FROM_THE_FUTURE", message="x"))
    assert (error.reason, error.message) == ("UNAVAILABLE", "x")
    assert wire.error_from_pb(types_pb2.ItemError()).message
