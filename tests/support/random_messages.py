"""Protobuf messages of any kind, filled with whatever their fields can hold."""

from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

M = TypeVar("M", bound=Message)

DEEPEST = 4
MOST = 4
# Small numbers too, since most of what is written in a message is one.
U32 = st.integers(0, 60) | st.integers(0, 2**32 - 1)
I32 = st.integers(-3, 60) | st.integers(-(2**31), 2**31 - 1)
U64 = st.integers(0, 60) | st.integers(0, 2**64 - 1)
I64 = st.integers(-3, 60) | st.integers(-(2**63), 2**63 - 1)
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_UINT32: U32,
    FieldDescriptor.TYPE_UINT64: U64,
    FieldDescriptor.TYPE_INT32: I32,
    FieldDescriptor.TYPE_SINT32: I32,
    FieldDescriptor.TYPE_INT64: I64,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.TYPE_STRING: st.text(max_size=12) | st.sampled_from(["a", "b", "s"]),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=12),
}


@st.composite
def messages(draw: st.DrawFn, kind: type[M]) -> M:
    """A message of `kind`; unknown values of enums are among it, as any peer can send them."""
    message = kind()
    _fill(draw, message, message.DESCRIPTOR, DEEPEST)
    return message


def _fill(draw: st.DrawFn, message: Any, descriptor: Descriptor, depth: int) -> None:
    for field in descriptor.fields:
        if not draw(st.booleans()):
            continue
        if field.message_type is not None:
            if depth == 0:
                continue
            if field.is_repeated:
                for _ in range(draw(st.integers(0, MOST))):
                    _fill(draw, getattr(message, field.name).add(), field.message_type, depth - 1)
            else:
                part = getattr(message, field.name)
                part.SetInParent()
                _fill(draw, part, field.message_type, depth - 1)
            continue
        values = _values(field)
        if field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(values, max_size=MOST)))
        else:
            setattr(message, field.name, draw(values))


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.enum_type is not None:
        return st.sampled_from([value.number for value in field.enum_type.values]) | I32
    return SCALARS[field.type]
