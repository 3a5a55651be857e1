"""Certificates and keys in files, and what is wrong with them. gRPC would only say of each
connection that its handshake failed; nothing here needs it.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NoReturn

from gpt.errors import ServerError

_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME: the dates are compared by whoever can tell them."""


class CertificateError(ServerError):
    """Certificate, key or CA cannot be used."""


def read(path: Path, what: str) -> bytes:
    """Raises CertificateError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(
            f"cannot read the {what} {path}: {error.strerror}; give a PEM file that this user may "
            "read"
        ) from None


def read_pair(cert: Path, key: Path, of: ssl._SSLMethod) -> tuple[ssl.SSLContext, bytes, bytes]:
    """A certificate with its chain, and its key.

    Args:
        of: the side that shows them, as `ssl.PROTOCOL_TLS_SERVER`.

    Returns:
        A context that shows them, the certificates' bytes and the key's.

    Raises:
        CertificateError: unreadable, no PEM, or a key of another certificate or with a password.
    """
    chain, private = read(cert, "certificate"), read(key, "key")
    context = ssl.SSLContext(of)
    try:
        context.load_cert_chain(cert, key, password=lambda: _no_password(key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CertificateError(
                f"the key in {key} does not belong to the certificate in {cert}; give those that "
                "were made together"
            ) from None
        wrong = cert if b"BEGIN CERTIFICATE" not in chain else key
        raise CertificateError(
            f"cannot use certificate {cert} with key {key}: {wrong} holds nothing usable in PEM "
            f"({error.reason})"
        ) from None
    if (chain, private) != (read(cert, "certificate"), read(key, "key")):
        raise CertificateError(f"{cert} and {key} are just being replaced")
    return context, chain, private


def _no_password(key: Path) -> NoReturn:
    raise CertificateError(
        f"the key {key} has a password, and nobody is there to give it; store it without one, "
        "readable by its user alone"
    )


def trusting(path: Path, pem: bytes) -> ssl.SSLContext:
    """A client that trusts these certificates themselves, whoever has signed them.

    Raises:
        CertificateError: there are none.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    try:
        context.load_verify_locations(cadata=pem.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise CertificateError(f"{path} holds no certificates in PEM ({reason})") from None
    return context
