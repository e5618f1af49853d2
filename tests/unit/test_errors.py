"""Every error crosses the wire and comes back as itself."""

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from outrider import errors
from outrider.errors import InternalError, OutriderError, error_types, from_status, to_status

OURS = [kind for kind in error_types().values() if kind.__module__ == errors.__name__]


def test_tree_is_complete_and_reasons_are_unique() -> None:
    declared = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, OutriderError)
    }
    assert set(OURS) == declared
    assert len({kind.reason for kind in declared}) == len(declared)


def test_every_error_is_drawn_in_the_tree() -> None:
    assert errors.__doc__ is not None
    assert [kind.__name__ for kind in OURS if kind.__name__ not in errors.__doc__] == []


@pytest.mark.parametrize("kind", OURS)
def test_round_trip_keeps_kind_code_and_message(kind: type[OutriderError]) -> None:
    status = to_status(kind("what happened: ü"))
    assert status.code == kind.code.value[0] != 0
    back = from_status(status_pb2.Status.FromString(status.SerializeToString()))
    assert type(back) is kind
    assert back.message == "what happened: ü"


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code.value[0]])
def test_every_foreign_status_becomes_an_error(code: grpc.StatusCode) -> None:
    back = from_status(status_pb2.Status(code=code.value[0], message="foreign"))
    assert back.message == "foreign"
    known = {kind.code for kind in OURS}
    assert back.code is (code if code in known else grpc.StatusCode.INTERNAL)
    # Never a special case of what the status says.
    assert type(back).__bases__ == (OutriderError,)


def test_unknown_number_and_foreign_details_are_survived() -> None:
    assert type(from_status(status_pb2.Status(code=99, message="?"))) is InternalError
    foreign = AnyMessage()
    foreign.Pack(error_details_pb2.ErrorInfo(reason="FENCED", domain="another.example"))
    status = status_pb2.Status(code=grpc.StatusCode.NOT_FOUND.value[0], details=[foreign])
    assert type(from_status(status)) is errors.NotFoundError


def test_an_error_without_a_message_names_its_reason() -> None:
    assert errors.OverloadedError().message == "OVERLOADED"


@pytest.mark.parametrize("seconds", [0.0, 0.25, 90.5])
def test_when_to_try_again_crosses_the_wire(seconds: float) -> None:
    status = to_status(errors.OverloadedError("full", retry_after_s=seconds))
    back = from_status(status_pb2.Status.FromString(status.SerializeToString()))
    assert (type(back), back.retry_after_s) == (errors.OverloadedError, seconds)
    assert from_status(to_status(errors.OverloadedError("full"))).retry_after_s is None


def test_details_that_can_not_be_read_are_none() -> None:
    status = to_status(errors.OverloadedError("full", retry_after_s=1.0))
    for detail in status.details:
        detail.value = b"\xff"
    back = from_status(status)
    assert (type(back), back.retry_after_s) == (errors.OverloadedError, None)
