"""Whatever bytes come, a decoder gives a value or says what is wrong; nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider import wire
from outrider.errors import InvalidRequestError, OutriderError, from_status, to_status
from outrider.pb.v1 import draft_pb2, types_pb2, verify_pb2
from tests.support.random_messages import messages

Decode = Callable[[Any], Any]
DECODERS: dict[str, tuple[type[Message], Decode]] = {
    "decode_command_from_pb": (verify_pb2.DecodeCommand, wire.decode_command_from_pb),
    "decode_event_from_pb": (verify_pb2.DecodeEvent, wire.decode_event_from_pb),
    "heartbeat_from_pb": (verify_pb2.Heartbeat, wire.heartbeat_from_pb),
    "draft_command_from_pb": (draft_pb2.DraftCommand, wire.draft_command_from_pb),
    "draft_event_from_pb": (draft_pb2.DraftEvent, wire.draft_event_from_pb),
    "draft_from_pb": (types_pb2.Draft, wire.draft_from_pb),
    "error_from_pb": (types_pb2.ItemError, wire.error_from_pb),
    "figures_from_pb": (types_pb2.SpeculationFigures, wire.figures_from_pb),
    "logprob_options_from_pb": (types_pb2.LogprobOptions, wire.logprob_options_from_pb),
    "logprobs_from_pb": (types_pb2.TokenLogprobs, wire.logprobs_from_pb),
    "sampling_from_pb": (types_pb2.SamplingParams, wire.sampling_from_pb),
    "speculation_from_pb": (types_pb2.SpeculationOptions, wire.speculation_from_pb),
    "tensor_from_pb": (types_pb2.Tensor, wire.tensor_from_pb),
    "timings_from_pb": (types_pb2.Timings, wire.timings_from_pb),
}
# The rule is a bare enum, which comes in SpeculationOptions.
BARE = {"rule_from_pb"}
ENCODERS: dict[str, Callable[..., Any]] = {
    name: getattr(wire, name.replace("_from_pb", "_to_pb")) for name in DECODERS
}


def read(name: str, pb: Message) -> Any:
    """The value, or None where the decoder refuses."""
    try:
        return DECODERS[name][1](pb)
    except InvalidRequestError:
        return None


def test_every_decoder_is_fuzzed() -> None:
    exported = {name for name in wire.__all__ if name.endswith("_from_pb")}
    assert set(DECODERS) == exported - BARE


@pytest.mark.parametrize("name", DECODERS)
@settings(deadline=None)
@given(data=st.data())
def test_any_message(name: str, data: st.DataObject) -> None:
    value = read(name, data.draw(messages(DECODERS[name][0])))
    if value is None:
        return
    # What was accepted means the same to the next one who reads it.
    encoded = ENCODERS[name](value)
    again = DECODERS[name][1](type(encoded).FromString(encoded.SerializeToString()))
    assert ENCODERS[name](again).SerializeToString() == encoded.SerializeToString()


@pytest.mark.parametrize("name", DECODERS)
@settings(deadline=None)
@given(data=st.data())
def test_any_bytes(name: str, data: st.DataObject) -> None:
    kind = DECODERS[name][0]
    sent = bytearray(data.draw(messages(kind)).SerializeToString())
    for _ in range(data.draw(st.integers(0, 3))):
        where = data.draw(st.integers(0, len(sent)))
        sent[where : where + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    try:
        pb = kind.FromString(bytes(sent))
    except DecodeError:
        return
    read(name, pb)


@settings(deadline=None)
@given(messages(status_pb2.Status))
@example(status_pb2.Status(code=8, message="x" * 10**6))
def test_any_status_is_an_error_that_can_be_sent_on(status: status_pb2.Status) -> None:
    error = from_status(status)
    assert isinstance(error, OutriderError)
    # Trailing metadata is small: grpc refuses what is above some kilobytes.
    assert to_status(error).ByteSize() < 4096


def test_a_tensor_of_very_many_dimensions_costs_nothing() -> None:
    pb = types_pb2.Tensor(dtype=types_pb2.TENSOR_DTYPE_FLOAT32, shape=[2**32 - 1] * 10**6)
    with pytest.raises(InvalidRequestError, match="dimensions"):
        wire.tensor_from_pb(pb)


def test_the_message_of_a_peer_is_cut() -> None:
    sent = types_pb2.ItemError(code=14, reason="UNAVAILABLE", message="é" * 10**6)
    error = wire.error_from_pb(sent)
    assert len(error.message.encode()) < 4096
    assert wire.error_to_pb(OutriderError("x" * 10**6)).ByteSize() < 4096
