"""What is wrong with certificates and keys, before a port is opened with them."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest
import trustme

from gpt.errors import UserError
from serve.pem import CertificateError
from serve.tls import Certificates, read_identity

NOW = datetime.datetime.now(datetime.timezone.utc)
DAY = datetime.timedelta(days=1)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def written(folder: Path, cert: trustme.LeafCert, name: str = "server") -> tuple[Path, Path]:
    chain, key = folder / f"{name}.pem", folder / f"{name}.key"
    chain.write_bytes(b"".join(pem.bytes() for pem in cert.cert_chain_pems))
    key.write_bytes(cert.private_key_pem.bytes())
    return chain, key


def test_a_good_one_is_read_with_its_dates(tmp_path: Path, authority: trustme.CA) -> None:
    ends = (NOW + 30 * DAY).replace(microsecond=0)
    chain, key = written(tmp_path, authority.issue_cert("localhost", not_after=ends))
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    identity = read_identity(chain, key, ca)
    assert identity.ends == ends.timestamp()
    assert (identity.chain, identity.key) == (chain.read_bytes(), key.read_bytes())
    assert identity.client_ca == ca.read_bytes()
    intermediate = authority.create_child_ca().issue_cert("localhost")
    assert len(intermediate.cert_chain_pems) == 2
    read_identity(*written(tmp_path, intermediate, "chain"), None)


@pytest.mark.parametrize(
    ("dates", "said"),
    [
        ({"not_after": NOW - DAY}, "has expired on 2.* UTC; renew it"),
        ({"not_before": NOW + DAY, "not_after": NOW + 2 * DAY}, "not valid before 2.*the clock"),
    ],
)
def test_the_dates_count(tmp_path: Path, authority: trustme.CA, dates: dict, said: str) -> None:
    dates = {"not_before": NOW - 9 * DAY, **dates}
    with pytest.raises(CertificateError, match=said) as caught:
        read_identity(*written(tmp_path, authority.issue_cert("localhost", **dates)), None)
    assert str(tmp_path / "server.pem") in str(caught.value)


def test_a_key_of_another_certificate_is_told(tmp_path: Path, authority: trustme.CA) -> None:
    chain, _ = written(tmp_path, authority.issue_cert("localhost"))
    _, other = written(tmp_path, authority.issue_cert("localhost"), "other")
    with pytest.raises(CertificateError, match=r"other.key does not belong to .*server.pem"):
        read_identity(chain, other, None)


def test_what_is_no_pem_or_not_there_is_told(tmp_path: Path, authority: trustme.CA) -> None:
    chain, key = written(tmp_path, authority.issue_cert("localhost"))
    junk = tmp_path / "junk"
    junk.write_bytes(b"\x00junk")
    for files in ((junk, key, None), (chain, junk, None), (key, chain, None), (chain, key, junk)):
        with pytest.raises(CertificateError, match="PEM"):
            read_identity(*files)
    with pytest.raises(CertificateError, match=r"cannot read the key .*No such file"):
        read_identity(chain, tmp_path / "none", None)


def test_a_key_with_a_password_is_told(tmp_path: Path, authority: trustme.CA) -> None:
    from cryptography.hazmat.primitives import serialization

    chain, key = written(tmp_path, authority.issue_cert("localhost"))
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(CertificateError, match="has a password"):
        read_identity(chain, key, None)


def test_a_reload_takes_what_is_good_and_keeps_what_was(
    tmp_path: Path, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    chain, key = written(tmp_path, authority.issue_cert("localhost"))
    certificates = Certificates(chain, key, None)
    assert not certificates.reload()
    fresh = authority.issue_cert("localhost", not_after=NOW + DAY)
    key.write_bytes(fresh.private_key_pem.bytes())
    with pytest.raises(UserError, match="does not belong"):
        certificates.reload()
    written(tmp_path, fresh)
    assert certificates.reload()
    assert not certificates.reload()
    assert [r.levelname for r in caplog.records] == ["WARNING"], "it ends soon"


def test_openssl_has_the_flag_that_is_not_in_the_standard_librarys_list() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= 0x200000
    assert context.verify_flags & 0x200000
