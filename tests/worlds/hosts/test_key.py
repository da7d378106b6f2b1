"""The key of a run over several hosts."""

from __future__ import annotations

import datetime
import os
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hybridtrain.errors import UserError
from hybridtrain.hosts.key import Key

KEY = Key.new()


def shakes_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """A handshake in memory; raises ``ssl.SSLError`` where one side refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for side in sides * 3:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert {side.version() for side in sides} == {"TLSv1.3"}


def test_a_file_of_mode_600_gives_the_same_key_again(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    KEY.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Key.read(path) == KEY == Key.from_bytes(KEY.to_bytes())
    shakes_hands(KEY.context(True), Key.read(path).context(False))


# ---- the user's own certificates -----------------------------------------------------------------


def own_key(root: Any, subject: Any, days: int = 1, more: Sequence[Any] = ()) -> bytes:
    """A key file: an authority's certificate, one that it has signed, and its private key."""
    pem = serialization.Encoding.PEM
    form = serialization.PrivateFormat.TraditionalOpenSSL
    made = signed(subject, root, days, more)
    key = subject.private_bytes(pem, form, serialization.NoEncryption())
    return signed(root, root).public_bytes(pem) + made.public_bytes(pem) + key


def signed(subject: Any, root: Any, days: int = 1, more: Sequence[Any] = ()) -> x509.Certificate:
    def name(key: Any) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "A" if key is root else "B")])

    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(name(root))
        .public_key(subject.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=9))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=subject is root, path_length=None), critical=True)
    )
    for each in more:
        made = made.add_extension(each, critical=False)
    return made.sign(root, hashes.SHA256())


def elliptic() -> Any:
    return ec.generate_private_key(ec.SECP256R1())


def test_each_host_may_have_a_certificate_of_its_own() -> None:
    root = elliptic()
    hosts = [elliptic(), rsa.generate_private_key(65537, 2048)]
    keys = [Key.from_bytes(own_key(root, each)) for each in hosts]
    shakes_hands(keys[0].context(True), keys[1].context(False))
    assert Key.from_bytes(keys[0].to_bytes().replace(b"\n", b"\r\n")) == keys[0]
    stranger = Key.from_bytes(own_key(elliptic(), hosts[1]))
    with pytest.raises(ssl.SSLError):
        shakes_hands(keys[0].context(True), stranger.context(False))


def test_certificates_that_do_not_fit_are_refused_at_once() -> None:
    root, host = elliptic(), elliptic()
    with pytest.raises(UserError, match="expired"):
        Key.from_bytes(own_key(root, host, days=-1))
    web = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    with pytest.raises(UserError, match="purpose"):
        Key.from_bytes(own_key(root, host, more=[web]))
    mine, other = own_key(root, host), own_key(elliptic(), host)
    mixed = other[: other.index(b"-----BEGIN", 1)] + mine[mine.index(b"-----BEGIN", 1) :]
    with pytest.raises(UserError, match="cannot be used: "):
        Key.from_bytes(mixed)
    locked = mine.replace(b"EC PRIVATE", b"ENCRYPTED PRIVATE")
    with pytest.raises(UserError, match="without a password"):
        Key.from_bytes(locked)
    with pytest.raises(UserError, match="is no key"):
        Key.from_bytes(mine[mine.index(b"-----BEGIN", 1) :])


def test_a_new_key_stands_strict_verification() -> None:
    """As ``ssl.create_default_context`` has it from Python 3.13 on: usages and identifiers."""
    sides = [KEY.context(True), KEY.context(False)]
    for side in sides:
        side.verify_flags |= ssl.VERIFY_X509_STRICT
    shakes_hands(*sides)


def test_neither_side_accepts_another_key() -> None:
    other = Key.new()
    with pytest.raises(ssl.SSLError):
        shakes_hands(KEY.context(True), other.context(False))
    nothing = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nothing.check_hostname, nothing.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ssl.SSLError):
        shakes_hands(KEY.context(True), nothing)


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    path.write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        KEY.write(path)
    assert path.read_text() == "mine"
    with pytest.raises(UserError, match="cannot write"):
        KEY.write(tmp_path / "no" / "folder")


def test_a_file_that_others_can_open_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    KEY.write(path)
    path.chmod(0o640)
    with pytest.raises(UserError, match="chmod 600"):
        Key.read(path)


def test_a_file_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.key"
    KEY.write(path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UserError, match="belongs to user"):
        Key.read(path)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "missing"):
        with pytest.raises(UserError, match="the key file"):
            Key.read(path)


WHOLE = KEY.to_bytes()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no key\n",
        WHOLE[:-40],
        WHOLE + b"more",
        WHOLE + WHOLE,
        KEY.certificate + KEY.authority,
        KEY.authority + KEY.certificate + Key.new().private_key,
        WHOLE.replace(WHOLE[100:104], b"AAAA", 1),
        bytes(range(256)),
    ],
)
def test_a_damaged_key_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.key"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        Key.read(path)


def test_without_the_package_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    with pytest.raises(UserError, match=r"hybridtrain\[hosts\]"):
        Key.new()


def test_the_private_key_is_not_shown() -> None:
    assert "PRIVATE" not in repr(KEY)
