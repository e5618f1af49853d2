"""What the metadata of a call says about its caller."""

import re
from typing import Any

import grpc

from outrider.errors import InvalidRequestError

Context = grpc.aio.ServicerContext[Any, Any]

TRACEPARENT = "traceparent"
TENANT = "outrider-tenant"

_TENANT = re.compile(r"[A-Za-z0-9._:@-]{0,128}")


def traceparent_of(context: Context) -> str:
    """The W3C trace context of the caller; "" for none."""
    return read_metadata(context, TRACEPARENT)


def named_tenant(context: Context) -> str:
    """On whose behalf the call says that it is made; "" when it does not say.

    Raises:
        InvalidRequestError: it can't be the name of a tenant.
    """
    tenant = read_metadata(context, TENANT)
    if not _TENANT.fullmatch(tenant):
        raise InvalidRequestError(
            f"{TENANT} {tenant[:140]!r} must be at most 128 characters of A-Z a-z 0-9 . _ : @ -"
        )
    return tenant


def read_metadata(context: Context, wanted: str) -> str:
    """The first value that the metadata of the call has for a key; "" for none."""
    for key, value in context.invocation_metadata() or ():
        if key == wanted:
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return ""
