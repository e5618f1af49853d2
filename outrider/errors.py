"""Every error of Outrider, and its one mapping to gRPC status and back.

    OutriderError
    ├── ConfigError               a setting is wrong, or two settings do not fit
    │   ├── UnsupportedModelError     the model can't be served exactly
    │   ├── TokenizerMismatchError    target and drafter disagree about token ids
    │   └── AddressInUseError         the port is taken
    ├── InvalidRequestError       the request can't be served as it is
    ├── NotFoundError
    │   ├── UnknownModelError
    │   └── UnknownSessionError
    ├── UnauthenticatedError      nobody can tell who calls
    ├── PermissionDeniedError     who calls may not do this
    ├── SessionExistsError        the client-chosen id is in use
    ├── FencedError               a message of an older epoch, or at another base_len
    ├── OverloadedError           full; try again later
    ├── UnavailableError          a part that is needed can't be reached
    │   ├── NoVerifyWorkerError
    │   ├── RecordsUnavailableError   Redis does not answer
    │   └── RankLostError             a rank of a split model is gone or stands still
    ├── SessionCancelledError
    ├── DeadlineError
    ├── NumericsError             the model gave NaN or infinite logits
    └── InternalError             a fault of Outrider itself

A message says what happened and what to do. `reason` is the stable word that crosses the
wire; `code` is the gRPC status. An error that passes by itself can say when to try again.
"""

import math
from typing import ClassVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "outrider"
# What is sent of a message, in UTF-8. grpc carries it twice in metadata, which is small.
MESSAGE_BYTES = 1000


class OutriderError(Exception):
    """Base of all errors that Outrider raises on purpose."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "OUTRIDER"

    def __init__(self, *args: object, retry_after_s: float | None = None) -> None:
        super().__init__(*args)
        # When the same call may succeed, in seconds from now; None where nobody knows.
        self.retry_after_s = retry_after_s

    @property
    def message(self) -> str:
        """What happened and what to do about it."""
        return str(self.args[0]) if self.args else self.reason


class ConfigError(OutriderError):
    """A setting is wrong, or two settings do not fit each other."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "CONFIG"


class UnsupportedModelError(ConfigError):
    """The model can't be served exactly; the message says why."""

    reason = "UNSUPPORTED_MODEL"


class TokenizerMismatchError(ConfigError):
    """Target and drafter disagree about token ids; the message names the first one."""

    reason = "TOKENIZER_MISMATCH"


class AddressInUseError(ConfigError):
    """Another process listens on the address."""

    reason = "ADDRESS_IN_USE"


class InvalidRequestError(OutriderError):
    """The request can't be served as it is."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"


class NotFoundError(OutriderError):
    """What the request names does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"


class UnknownModelError(NotFoundError):
    """The coordinator serves another model."""

    reason = "UNKNOWN_MODEL"


class UnknownSessionError(NotFoundError):
    """There is no such session, or it has expired."""

    reason = "UNKNOWN_SESSION"


class UnauthenticatedError(OutriderError):
    """The call has no token or certificate that says whose it is, or a wrong one."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDeniedError(OutriderError):
    """The caller is known, and may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class SessionExistsError(OutriderError):
    """A session with the client-chosen id exists already."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "SESSION_EXISTS"


class FencedError(OutriderError):
    """The message belongs to an older epoch, or its base_len is not the session's length."""

    code = grpc.StatusCode.ABORTED
    reason = "FENCED"


class OverloadedError(OutriderError):
    """The service is full; the same call may succeed later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"


class UnavailableError(OutriderError):
    """A part that is needed can't be reached; the same call may succeed later."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"


class NoVerifyWorkerError(UnavailableError):
    """No verify worker is up for the model."""

    reason = "NO_VERIFY_WORKER"


class RecordsUnavailableError(UnavailableError):
    """Redis does not answer."""

    reason = "RECORDS_UNAVAILABLE"


class RankLostError(UnavailableError):
    """A rank of a model that is split over several is gone, or stands still."""

    reason = "RANK_LOST"


class SessionCancelledError(OutriderError):
    """The session was cancelled."""

    code = grpc.StatusCode.CANCELLED
    reason = "SESSION_CANCELLED"


class DeadlineError(OutriderError):
    """The deadline passed before the call was done."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE"


class NumericsError(OutriderError):
    """The model gave NaN or infinite logits for this request."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "NUMERICS"


class InternalError(OutriderError):
    """A fault of Outrider itself; the logs of the service hold the traceback."""

    reason = "INTERNAL"


def error_types() -> dict[str, type[OutriderError]]:
    """Every error class by its reason."""
    found: dict[str, type[OutriderError]] = {}
    pending: list[type[OutriderError]] = [OutriderError]
    while pending:
        kind = pending.pop()
        found[kind.reason] = kind
        pending.extend(kind.__subclasses__())
    return found


def from_reason(reason: str, message: str, code: grpc.StatusCode | None = None) -> OutriderError:
    """The error that `reason` names; an unknown reason falls back on the status code."""
    kind = error_types().get(reason) or _by_code(code)
    return kind(message)


def _by_code(code: grpc.StatusCode | None) -> type[OutriderError]:
    base = {kind.code: kind for kind in reversed(list(OutriderError.__subclasses__()))}
    if code is None or code not in base:
        return InternalError
    return InternalError if code is grpc.StatusCode.INTERNAL else base[code]


def shortened(message: str) -> str:
    """As much of a message as is sent; it may hold what a client or a peer made up."""
    encoded = message.encode("utf-8", "replace")
    if len(encoded) <= MESSAGE_BYTES:
        return message
    return f"{encoded[:MESSAGE_BYTES].decode('utf-8', 'ignore')}..."


def to_status(error: OutriderError) -> status_pb2.Status:
    """The `google.rpc.Status` of an error.

    Its details are the reason as an `ErrorInfo` and, where it is known, when to try again as a
    `RetryInfo`.
    """
    details = [AnyMessage()]
    details[0].Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(math.ceil(error.retry_after_s * 1000))
        details.append(AnyMessage())
        details[1].Pack(retry)
    message = shortened(error.message)
    return status_pb2.Status(code=error.code.value[0], message=message, details=details)


def from_status(status: status_pb2.Status) -> OutriderError:
    """The error of a `google.rpc.Status`; the inverse of `to_status`."""
    reason, retry_after_s = "", None
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if _unpack(detail, info) and info.domain == DOMAIN:
            reason = info.reason
        elif _unpack(detail, retry):
            delay = retry.retry_delay
            retry_after_s = max(delay.seconds + delay.nanos / 1e9, 0.0)
    error = from_reason(reason, shortened(status.message), code_of(status.code))
    error.retry_after_s = retry_after_s
    return error


def _unpack(detail: AnyMessage, into: Message) -> bool:
    """Whether the detail is of that kind; one that can't be read is of none."""
    try:
        return detail.Unpack(into)
    except DecodeError:
        return False


def code_of(number: int) -> grpc.StatusCode | None:
    """The status code with that number, if there is one."""
    return next((code for code in grpc.StatusCode if code.value[0] == number), None)
