"""JSON objects of which a few members are read or changed and all others stay as they were written."""

from typing import Any, TypeAlias

import msgspec

RawFields: TypeAlias = dict[str, msgspec.Raw]

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what reading bytes that are no JSON raises


def read_fields(data: bytes) -> RawFields:
    """The members of the object `data`, in their order; of members of the same name the last.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: `data` is not a JSON object.
    """
    return msgspec.json.decode(data, type=RawFields)


def spelling(fields: RawFields, name: str) -> bytes:
    """How a member's value is written; `null` where it is absent."""
    return bytes(fields[name]) if name in fields else b"null"


def value(fields: RawFields, name: str) -> Any:
    """A member's value; None where it is absent."""
    return msgspec.json.decode(fields[name]) if name in fields else None


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
