"""How a server is reached, by whom and within which limits: the settings and their flags.

No gRPC and no torch: flags are checked before either is loaded.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from gpt.arguments import SecretFlag, add_switch, number
from gpt.errors import ConfigError

MIB = 2**20
MAX_BYTES = 2**31 - 1
"""gRPC counts the bytes of a message in an int."""


@dataclass(frozen=True, kw_only=True)
class ListenSettings:
    """What is between the network and the service.

    Attributes:
        host: a name or address, or `unix:PATH`.
        port: 0 takes a free one; without meaning for a Unix socket.
        socket_mode: permissions of a Unix socket's file.
        tls_cert, tls_key: PEM files of the certificate with its chain, and of its key; both or
            neither.
        tls_client_ca: PEM file; clients must show a certificate that one of these has signed.
        api_keys_file: keys that callers must have one of; see `serve.auth`.
        api_keys: more keys, in the same form, with commas in place of line ends.
        key_concurrent: most requests that one key may have running at once; None: any number.
        key_per_minute: most requests of one key in the long run; None: any number.
        max_receive_bytes, max_send_bytes: largest message in each direction.
        max_prompt_bytes: longest text that is looked at, in UTF-8.
        keepalive_seconds: after so long without a sign of life a client is pinged; 0: never.
        max_connection_age: seconds after which a client is asked to connect anew; 0: never.
        max_connection_age_grace: seconds that calls on the old connection then get to end; 0: any
            time.
        min_ping_seconds: a client that pings more often, and has nothing else to say, is cut off.
        reflection: whether the services describe themselves.
    """

    host: str = "127.0.0.1"
    port: int = 0
    socket_mode: int = 0o600
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    api_keys_file: Path | None = None
    api_keys: str = field(default="", repr=False)
    key_concurrent: int | None = None
    key_per_minute: int | None = None
    max_receive_bytes: int = 4 * MIB
    max_send_bytes: int = 256 * MIB
    max_prompt_bytes: int = MIB
    keepalive_seconds: float = 60.0
    min_ping_seconds: float = 5.0
    max_connection_age: float = 0.0
    max_connection_age_grace: float = 0.0
    reflection: bool = True

    def __post_init__(self) -> None:
        for given, other, missing in [
            (self.tls_cert, self.tls_key, "a certificate needs its key: --tls-key FILE"),
            (self.tls_key, self.tls_cert, "a key needs its certificate: --tls-cert FILE"),
            (self.tls_client_ca, self.tls_cert, "--tls-client-ca needs --tls-cert and --tls-key"),
            (
                self.max_connection_age_grace,
                self.max_connection_age,
                "--max-connection-age-grace counts from an age: give --max-connection-age S",
            ),
            (
                self.key_concurrent or self.key_per_minute,
                self.api_keys_file or self.api_keys,
                "limits are for each key, and there are no keys: give --api-keys-file FILE",
            ),
        ]:
            if given and not other:
                raise ConfigError(missing)


def add_listen_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ListenSettings`, but for `api_keys`: what is secret is no flag."""
    default = ListenSettings()
    group = parser.add_argument_group("network")
    group.add_argument(
        "--host",
        default=default.host,
        metavar="ADDRESS",
        help="where to listen: a name or IP address, or unix:PATH for a socket in the file system "
        "(default: 127.0.0.1, this machine only)",
    )
    group.add_argument(
        "--port",
        type=number(int, 0, 65535),
        default=50051,
        metavar="N",
        help="0 takes a free one, which the ready line tells (default: 50051)",
    )
    group.add_argument(
        "--socket-mode",
        type=_mode,
        default=default.socket_mode,
        metavar="MODE",
        help="permissions of the Unix socket, in octal (default: 600, this user only)",
    )
    group.add_argument(
        "--keepalive-seconds",
        type=number(float, 0, 86_400),
        default=default.keepalive_seconds,
        metavar="S",
        help="ping clients that say nothing for so many seconds, and drop those that do not answer "
        "in 20 (default: 60; 0: never)",
    )
    group.add_argument(
        "--min-ping-seconds",
        type=number(float, 0.01, 3600),
        default=default.min_ping_seconds,
        metavar="S",
        help="drop clients that ping more often than every so many seconds (default: 5)",
    )
    group.add_argument(
        "--max-connection-age",
        type=number(float, 0, 2_000_000),
        default=default.max_connection_age,
        metavar="S",
        help="have clients connect anew after so many seconds, a tenth more or less, so that those "
        "that spread their calls find new servers; calls that run go on (default: 0, never)",
    )
    group.add_argument(
        "--max-connection-age-grace",
        type=number(float, 0, 2_000_000),
        default=default.max_connection_age_grace,
        metavar="S",
        help="cut off calls that run so many seconds after that (default: 0, never)",
    )
    group.add_argument(
        "--max-receive-bytes",
        type=number(int, 1024, MAX_BYTES),
        default=default.max_receive_bytes,
        metavar="N",
        help="largest request; larger ones get RESOURCE_EXHAUSTED (default: 4194304)",
    )
    group.add_argument(
        "--max-send-bytes",
        type=number(int, 1024, MAX_BYTES),
        default=default.max_send_bytes,
        metavar="N",
        help="largest single message of an answer, likewise (default: 268435456)",
    )
    group.add_argument(
        "--max-prompt-bytes",
        type=number(int, 1, MAX_BYTES),
        default=default.max_prompt_bytes,
        metavar="N",
        help="longest text, in bytes of UTF-8, to continue, score or tokenize; what is longer is "
        "refused before it is tokenized (default: 1048576)",
    )
    add_switch(
        group,
        "--reflection",
        default=default.reflection,
        help="let tools such as grpcurl ask which RPCs there are (default: on)",
    )
    group = parser.add_argument_group(
        "TLS and keys", "The files are read again when they change; streams go on."
    )
    for flag, text in [
        ("--tls-cert", "certificate and chain (PEM) to serve TLS with"),
        ("--tls-key", "private key (PEM) of the certificate, without a password"),
        ("--tls-client-ca", "let in only clients with a certificate signed by one of these (PEM)"),
        ("--api-keys-file", "let in only callers with one of these keys, one LABEL KEY a line"),
    ]:
        group.add_argument(flag, type=Path, metavar="FILE", help=f"{text} (default: none)")
    place = "a file (--api-keys-file FILE) or the variable ANTIPHON_SERVE_API_KEYS"
    group.add_argument("--api-keys", action=SecretFlag, place=place)
    group.add_argument(
        "--key-concurrent",
        type=number(int, 1, 100_000),
        metavar="N",
        help="most requests of one key at once; more get RESOURCE_EXHAUSTED (default: any number)",
    )
    group.add_argument(
        "--key-per-minute",
        type=number(int, 1, 1_000_000),
        metavar="N",
        help="most requests of one key in a minute, likewise (default: any number)",
    )


def _mode(text: str) -> int:
    """An argparse type: permissions of a file."""
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0o600 <= mode <= 0o777 or mode & 0o600 != 0o600:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no mode: three octal digits that let the owner read and write, as 660"
        )
    return mode
