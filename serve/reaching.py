"""The flags by which commands reach a server: where it is, TLS, and a key. One description of them,
and no gRPC: what is wrong with them is told before that is loaded.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.arguments import SecretFlag
from gpt.errors import ServerError
from serve.connection import DEFAULT_TARGET, NEAR, SEVERAL, Connection, Tls

if TYPE_CHECKING:
    from serve.client import Client

KEY_VARIABLE = "ANTIPHON_API_KEY"
MOST_KEY_BYTES = 8192
"""More than any server takes in its metadata; so a model that is given for a key is not read."""


def target(text: str) -> str:
    """An argparse type: where a server is."""
    host, _, port = text.rpartition(":")
    if text.startswith("unix:"):
        good = text != "unix:"
    elif text.startswith(SEVERAL):
        good = port.isascii() and port.isdigit() and len(host) > len("dns:")
    else:  # without a port gRPC would try 443 at once
        good = re.fullmatch(r"[^/,\s]+:\d{1,5}", text) is not None and 0 < int(port) < 2**16
    if not good:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address of a server; it must be HOST:PORT, as localhost:50051, or "
            "unix:PATH, or dns:///NAME:PORT for all servers of a name"
        )
    return text


def add_target_argument(
    parser: argparse._ActionsContainer,
    flag: str = "--target",
    *,
    default: str | None = DEFAULT_TARGET,
    help: str | None = None,
) -> None:
    """Where the server is."""
    parser.add_argument(
        flag,
        type=target,
        default=default,
        metavar="HOST:PORT",
        help=help or f"the server; unix:PATH for one on a socket (default: {default})",
    )


def add_security_arguments(parser: argparse.ArgumentParser) -> None:
    """TLS, and who asks. `connection` makes of it what a client needs."""
    group = parser.add_argument_group(
        "TLS and key",
        "Each flag of TLS turns it on. The API key is taken from a file or from the variable\n"
        f"{KEY_VARIABLE}, and is no flag: whoever is on this machine can see those.",
    )
    group.add_argument(
        "--tls",
        action="store_true",
        help="reach the server by TLS, trusting the usual authorities",
    )
    group.add_argument(
        "--tls-ca",
        metavar="FILE",
        help="trust servers that an authority in this file (PEM) has signed, and no others",
    )
    group.add_argument(
        "--tls-cert",
        metavar="FILE",
        help="show this certificate (PEM) to a server that asks for one (mTLS)",
    )
    group.add_argument("--tls-key", metavar="FILE", help="the certificate's key (PEM)")
    group.add_argument(
        "--tls-server-name",
        metavar="NAME",
        help="the name in the server's certificate, if it is reached by another",
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help=f"send the API key in this file, which holds nothing else (default: ${KEY_VARIABLE}, "
        "if that is set)",
    )
    place = f"a file (--api-key-file FILE) or the variable {KEY_VARIABLE}"
    group.add_argument("--api-key", action=SecretFlag, place=place)


SECURITY = ("tls", "tls_ca", "tls_cert", "tls_key", "tls_server_name", "api_key_file")


def refuse_without_target(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """For commands that can do without a server: what says how to reach one needs one."""
    if given := next((name for name in SECURITY if getattr(args, name)), None):
        parser.error(
            f"--{given.replace('_', '-')} says how a server is reached, and none is given; add "
            "--target HOST:PORT"
        )


def connection(
    args: argparse.Namespace, target: str, environ: Mapping[str, str] = os.environ
) -> Connection:
    """What the flags of `add_security_arguments` say, checked as far as this machine can tell.

    Raises:
        ServerError: a file that is missing or not what it must be; flags that do not go together.
    """
    tls = None
    given = (args.tls_ca, args.tls_cert, args.tls_key, args.tls_server_name)
    if args.tls or any(value is not None for value in given):
        tls = Tls(*given)
        if (tls.certificate is None) != (tls.key is None):
            raise ServerError(
                f"{'--tls-key' if tls.key else '--tls-cert'} is given alone; a server that asks "
                "for a certificate wants both: --tls-cert FILE --tls-key FILE"
            )
        tls.read()
    key = None
    if args.api_key_file is not None:
        key = key_in(Path(args.api_key_file).expanduser())
    elif environ.get(KEY_VARIABLE, "").strip():
        key = _key(environ[KEY_VARIABLE], KEY_VARIABLE)
    if key is not None and tls is None and not target.startswith(NEAR):
        print(f"note: without TLS the API key travels in the clear to {target}", file=sys.stderr)
    return Connection(target, tls, key)


def key_in(path: Path) -> str:
    """The key in a file, without the white space around it.

    Raises:
        ServerError: none is there. It never tells what the file holds.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_KEY_BYTES + 1)
    except OSError as error:
        raise ServerError(
            f"cannot read the API key file {path}: {error.strerror}; give a file that holds the "
            f"key alone, or set {KEY_VARIABLE}"
        ) from None
    if len(data) > MOST_KEY_BYTES:
        raise ServerError(f"{path} has more than {MOST_KEY_BYTES} bytes, so it is no API key")
    return _key(data.decode("utf-8", "replace"), str(path))


def _key(text: str, where: str) -> str:
    words = text.split()
    if len(words) != 1:
        raise ServerError(
            f"{where} holds {len(words) or 'no'} words and must hold one, the API key; the label "
            "before it, in the server's file, is not sent"
        )
    (key,) = words
    if re.fullmatch(r"sha256:[0-9a-fA-F]{64}", key):
        raise ServerError(
            f"{where} holds the digest that the server keeps, which is no key; give the key itself"
        )
    if not (key.isascii() and key.isprintable()):
        raise ServerError(
            f"{where} has characters that no header can carry; a key is printable ASCII"
        )
    return key


def client(connection: Connection, timeout: float | None) -> Client:
    """A client for a command: gRPC keeps its own log to itself, since each error is one line."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from serve.client import Client

    return Client(
        connection.target,
        timeout=timeout,
        tls=connection.tls or False,
        api_key=connection.api_key,
    )
