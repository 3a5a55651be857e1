"""Where a server listens: HOST:PORT, or a Unix socket with all that a file asks for."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from gpt.errors import ServerError

MAX_SOCKET_PATH = 107
"""Bytes that Linux has for a socket's path; others have less, and say so."""

OTHER_SCHEMES = ("unix-abstract", "vsock", "dns", "ipv4", "ipv6")


def host_of(host: str) -> str:
    """A host as it stands before `:PORT`.

    Raises:
        ServerError: what gRPC would take for another kind of address, and HOST:PORT for a path.
    """
    if host.partition(":")[0] in OTHER_SCHEMES:
        raise ServerError(
            f"{host!r} is no address to listen on; give a host name, an IP address or unix:PATH"
        )
    return f"[{host}]" if ":" in host else host


class UnixSocket:
    """The file of a socket: taken over if nobody listens there any more, removed at the end.

    Args:
        mode: its permissions; whoever may write may connect.

    Raises:
        ServerError: the path cannot be a socket's.
    """

    def __init__(self, path: Path, mode: int) -> None:
        # The place must not depend on the folder that a client is in.
        self.path = path.absolute()
        self.address = f"unix:{self.path}"
        self._mode = mode
        self._inode: int | None = None
        if len(os.fsencode(self.path)) > MAX_SOCKET_PATH or "%" in str(path):
            raise ServerError(
                f"{self.path} cannot be a socket's path: at most {MAX_SOCKET_PATH} bytes, without %"
            )

    @contextlib.contextmanager
    def binding(self) -> Iterator[None]:
        """Make way for a bind within, and see to the permissions of what it makes.

        Raises:
            ServerError: somebody listens there, or the file is something else.
        """
        self._make_way()
        before = os.umask(0o777 & ~self._mode)  # at no moment may others connect
        try:
            yield
        finally:
            os.umask(before)
        with contextlib.suppress(FileNotFoundError):  # the bind has failed, and says so
            self.path.chmod(self._mode)
            self._inode = self.path.stat().st_ino

    def _make_way(self) -> None:
        """gRPC removes any socket that is in its way, also one that another server listens on."""
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            if not self.path.parent.is_dir():
                raise ServerError(f"there is no folder {self.path.parent} for the socket") from None
            return
        except OSError as error:
            raise ServerError(f"cannot listen on {self.address}: {error.strerror}") from None
        if not stat.S_ISSOCK(found.st_mode):
            raise ServerError(f"{self.path} is there and is no socket; choose another path")
        if found.st_ino == self._inode:  # ours
            return
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            code = probe.connect_ex(str(self.path))
        if code == errno.ECONNREFUSED:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
        elif code != errno.ENOENT:
            raise ServerError(
                f"cannot listen on {self.address}: another server does; stop it, or choose "
                "another path"
            )

    def remove(self) -> None:
        """Take the file away, if it is still the one that was made here."""
        with contextlib.suppress(OSError):
            if self._inode is not None and self.path.lstat().st_ino == self._inode:
                self.path.unlink()
