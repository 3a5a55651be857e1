"""Just enough of HTTP/2 to be a client as gRPC's own library never is: idle by the thousand,
pinging too much, or never reading. Source: RFC 9113 (frames), RFC 7541 (literal header fields).
"""

from __future__ import annotations

import socket
import struct
from types import TracebackType

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4


class Connection:
    """A connection to a server, made with the settings that a client begins with.

    Args:
        target: `host:port`.
        window: bytes that the server may send on each stream; 0: none, ever.
    """

    def __init__(self, target: str, *, window: int = 65_535) -> None:
        host, _, port = target.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, window)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))
        self._unread = b""

    def next_frame(self) -> tuple[int, int, bytes] | None:
        """Type, flags and payload; None at the end of the connection."""
        while len(self._unread) < 9 or len(self._unread) < 9 + self._length():
            try:
                more = self.socket.recv(65_536)
            except ConnectionError:
                more = b""
            if not more:
                return None
            self._unread += more
        end = 9 + self._length()
        found = self._unread[3], self._unread[4], self._unread[9:end]
        self._unread = self._unread[end:]
        return found

    def _length(self) -> int:
        return int.from_bytes(self._unread[:3], "big")

    def await_settings(self) -> None:
        """Wait until the server has taken the connection, and agree to what it says."""
        while (found := self.next_frame()) is not None:
            if found[0] == SETTINGS and not found[1] & ACK:
                self.socket.sendall(frame(SETTINGS, ACK, 0))
                return
        raise AssertionError("the server has closed the connection")

    def ping(self) -> bool:
        """Ping, and wait for the answer; False if the server says goodbye instead."""
        try:
            self.socket.sendall(frame(PING, 0, 0, b"antiphon"))
        except ConnectionError:
            return False
        while (found := self.next_frame()) is not None:
            if found[0] == GOAWAY:
                return False
            if found[0] == PING and found[1] & ACK:
                return True
        return False

    def call(self, path: str, message: bytes) -> None:
        """Begin an RPC on stream 1; what it answers is not waited for."""
        fields = [
            (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test"),
            ("content-type", "application/grpc"), ("te", "trailers"),
        ]  # fmt: skip
        block = b"".join(
            b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
            for name, value in fields
        )
        body = b"\x00" + len(message).to_bytes(4, "big") + message
        self.socket.sendall(
            frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, END_STREAM, 1, body)
        )

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.socket.close()


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream) + payload
    )
