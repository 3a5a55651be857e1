"""Messages and bytes that no sensible client sends. All follow from a random generator's seed."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

STRINGS = [
    "", "a", "ab" * 30, "\0", "\n", "文🌶", "<|endoftext|>", "scripted", "{", '{"type": "object"}',
    '{"type": 1}', "[a-z]+", "(a", "a{1000000}", "(a*)*b", "(?=x)", 'start: "a" | start "b"',
    "start: nothing", "x" * 5_000,
]  # fmt: skip
INTEGERS = [0, 1, 2, 3, 7, 64, 255, 256, 257, 1000, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
DOUBLES = [
    0.0, -0.0, 1.0, 0.5, 1e-300, 1e300, -1.0, 2.0, float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def fill(message: Message, rng: random.Random, depth: int = 0) -> None:
    """Set some fields to values that are allowed by their types, and perhaps by nothing else."""
    fields = message.DESCRIPTOR.fields
    few = rng.choice([0.1, 0.3, 0.9])
    for field in fields:
        # What holds all the rest is nearly always there: else most messages would be empty.
        inner = field.message_type is not None and depth == 0
        if rng.random() > (0.95 if inner else few):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name
            for _ in range(rng.choice([1, 3])):
                key = _scalar(entry["key"], rng)
                getattr(message, field.name)[key] = _scalar(entry["value"], rng)
        elif field.is_repeated:
            count = rng.choice([1, 1, 2, 5, 70])
            values = getattr(message, field.name)
            if field.message_type is not None:
                for _ in range(min(count, 5)):
                    fill(values.add(), rng, depth + 1)
            else:
                values.extend(_scalar(field, rng) for _ in range(count))
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name), rng, depth + 1)
        else:
            setattr(message, field.name, _scalar(field, rng))


def _scalar(field: FieldDescriptor, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(DOUBLES)
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return rng.choice(STRINGS)
    low, high = _BITS[kind]
    return max(low, min(high, rng.choice(INTEGERS) * rng.choice([1, 1, -1])))


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, left out, put in or repeated."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randint(0, len(changed))
        kind = rng.randrange(4)
        if kind == 0:
            changed[at : at + 1] = rng.randbytes(1)
        elif kind == 1:
            del changed[at : at + rng.randint(1, 8)]
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.randint(1, 8))
        else:
            changed[at:at] = changed[at : at + rng.randint(1, 40)]
    return bytes(changed)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
WINDOW_UPDATE, CONTINUATION = 8, 9


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """An HTTP/2 frame (RFC 9113, 4.1); `length` may lie."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(path: str | bytes) -> bytes:
    """The header block of a gRPC call, every field a literal that is not indexed (RFC 7541)."""
    fields = {
        b":method": b"POST", b":scheme": b"http", b":authority": b"x",
        b":path": path.encode() if isinstance(path, str) else path,
        b"content-type": b"application/grpc", b"te": b"trailers",
    }  # fmt: skip
    block = b""
    for name, value in fields.items():
        block += b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
    return block


def connections(rng: random.Random, path: str) -> Iterator[bytes]:
    """What connections send that keep to no protocol, or to HTTP/2 up to some point."""
    opened = PREFACE + frame(SETTINGS, 0, 0, b"")
    call = opened + frame(HEADERS, 4, 1, headers(path))
    yield b""
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield rng.randbytes(200)
    yield b"\x16\x03\x01\x02\x00\x01\x00" + rng.randbytes(100)  # the beginning of TLS
    yield PREFACE[:-3]
    yield PREFACE + rng.randbytes(100)
    yield opened + frame(HEADERS, 4, 1, rng.randbytes(60))
    yield opened + frame(HEADERS, 0, 1, headers(path)) + frame(DATA, 0, 1, b"")
    yield opened + frame(CONTINUATION, 4, 1, headers(path))
    yield opened + frame(HEADERS, 4, 2, headers(path))  # only servers open even streams
    yield opened + frame(HEADERS, 4, 1, headers("/" + "x" * 120)) + frame(DATA, 1, 1, b"")
    yield opened + frame(SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff")
    yield opened + frame(SETTINGS, 0, 1, b"123")
    yield opened + frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff") * 2
    yield opened + frame(PING, 0, 0, b"123")
    yield opened + frame(PING, 0, 0, bytes(8)) * 1000
    yield opened + frame(GOAWAY, 0, 0, bytes(8))
    yield opened + frame(DATA, 0, 1, b"", length=2**24 - 1)
    yield opened + frame(99, 255, 2**31 - 1, rng.randbytes(30))
    yield call + frame(DATA, 1, 1, b"\0\0\0\0\5abc")  # a message that ends too early
    yield call + frame(DATA, 1, 1, b"\0\xff\xff\xff\xff")  # one of 4 GiB
    yield call + frame(DATA, 1, 1, b"\1\0\0\0\3abc")  # compressed, it says
    yield call + frame(DATA, 1, 1, b"\7\0\0\0\0")
    yield call + frame(DATA, 1, 1, b"\0\0\0\0\0" * 2)  # two messages
    yield call + frame(DATA, 1, 1, b"")
    yield call + frame(RST_STREAM, 0, 1, bytes(4))
    yield call + frame(HEADERS, 5, 1, headers(path))
    rapid = [
        frame(HEADERS, 4, 2 * i + 1, headers(path)) + frame(RST_STREAM, 0, 2 * i + 1, bytes(4))
        for i in range(200)
    ]
    yield opened + b"".join(rapid)
    for _ in range(10):
        yield PREFACE + mutate(call[len(PREFACE) :] + frame(DATA, 1, 1, b"\0\0\0\0\2\x0a\0"), rng)
