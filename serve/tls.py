"""TLS and mutual TLS, with certificates that can be replaced while streams run.

What is wrong with certificate and key is found before the port is opened: gRPC would only say of
each connection that its handshake failed.
"""

from __future__ import annotations

import logging
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

import grpc

from serve import pem
from serve.pem import CertificateError

log = logging.getLogger(__name__)

SOON_SECONDS = 7 * 86_400.0
"""A certificate that ends sooner is warned of."""


@dataclass(frozen=True)
class Identity:
    """What a server shows, and whom it trusts: PEM, as gRPC takes it.

    Attributes:
        ends: seconds since 1970 until which the certificate is valid.
    """

    key: bytes
    chain: bytes
    client_ca: bytes | None
    ends: float

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.chain)], root_certificates=self.client_ca
        )


def read_identity(cert: Path, key: Path, client_ca: Path | None) -> Identity:
    """Read and check the files.

    Raises:
        CertificateError: unreadable, no PEM, a key of another certificate or with a password,
            expired, not valid yet, or not made for a server.
    """
    own, chain, private = pem.read_pair(cert, key, ssl.PROTOCOL_TLS_SERVER)
    starts, ends = _validity(own, cert, chain)
    now = time.time()
    if now >= ends:
        raise CertificateError(f"the certificate {cert} has expired on {_day(ends)}; renew it")
    if now < starts:
        raise CertificateError(
            f"the certificate {cert} is not valid before {_day(starts)}; is the clock right?"
        )
    authority = None
    if client_ca is not None:
        authority = pem.read(client_ca, "client CA")
        pem.trusting(client_ca, authority)
    return Identity(private, chain, authority, ends)


class Certificates:
    """A server's identity, read again on demand.

    Args:
        cert, key, client_ca: PEM files; with a client CA, clients must show certificates.

    Raises:
        CertificateError: see `read_identity`.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._files = (cert, key, client_ca)
        self.paths = [cert, key] if client_ca is None else [cert, key, client_ca]
        self._identity = read_identity(*self._files)
        self._tell()

    def credentials(self) -> grpc.ServerCredentials:
        """For a port. Connections made after a reload get the new identity; others stay."""
        given = self._identity

        def newer() -> grpc.ServerCertificateConfiguration | None:
            """Asked by gRPC before every handshake, in a thread of its own."""
            nonlocal given
            if self._identity is given:
                return None
            given = self._identity
            return given.configuration()

        return grpc.dynamic_ssl_server_credentials(
            given.configuration(), newer, require_client_authentication=len(self.paths) == 3
        )

    def reload(self) -> bool:
        """Read the files again; whether they hold anything new.

        Raises:
            CertificateError: they cannot be used; what was read before stays.
        """
        found = read_identity(*self._files)
        if found == self._identity:
            return False
        self._identity = found
        self._tell()
        return True

    def _tell(self) -> None:
        ends = self._identity.ends
        level = logging.WARNING if ends - time.time() < SOON_SECONDS else logging.INFO
        log.log(level, "the TLS certificate %s is valid until %s", self._files[0], _day(ends))


def _validity(own: ssl.SSLContext, path: Path, chain: bytes) -> tuple[float, float]:
    """From when to when, told by a handshake within memory: what parses certificates in the
    standard library shows them of a peer only. It finds out, too, what is not made for a server."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = own.wrap_bio(to_server, to_client, server_side=True)
    client = pem.trusting(path, chain).wrap_bio(to_client, to_server)
    done = False
    try:
        while not done:
            done = _advance(client)
            _advance(server)
    except ssl.SSLCertVerificationError as error:
        raise CertificateError(
            f"no client would accept the certificate {path}: {error.verify_message}"
        ) from None
    except ssl.SSLError as error:
        raise CertificateError(f"the certificate {path} cannot be used: {error.reason}") from None
    shown = client.getpeercert()
    assert shown, "a client that verifies knows its peer"
    starts, ends = (ssl.cert_time_to_seconds(str(shown[k])) for k in ("notBefore", "notAfter"))
    return float(starts), float(ends)


def _advance(side: ssl.SSLObject) -> bool:
    """Whether its handshake is done."""
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
