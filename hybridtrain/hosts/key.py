"""The key of a run over several hosts: whoever holds it may take part, and nobody else.

A certificate authority of its own signs one certificate, which all hosts share; the authority's
private key is thrown away. So a host shows that it holds the private key, and needs no name. A file
of the user's own has an authority's certificate, that of the host with those between, and the
host's private key; then each host may have its own.
"""

from __future__ import annotations

import datetime
import os
import re
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtrain.errors import UserError
from hybridtrain.util.anonymous_files import anonymous_descriptor
from hybridtrain.util.files import open_input, reason_of

if TYPE_CHECKING:
    from cryptography import x509

_MOST_BYTES = 1 << 16  # of a key file
_BLOCK = re.compile(rb"-----BEGIN ([A-Z ]+)-----\n[A-Za-z0-9+/=\n]+-----END \1-----\n")
_CERTIFICATE, _PRIVATE = b"CERTIFICATE", (b"PRIVATE KEY", b"EC PRIVATE KEY", b"RSA PRIVATE KEY")
_YEARS = 10


@dataclass(frozen=True)
class Key:
    """Authority, certificate (with those between it and the authority), private key, as PEM."""

    authority: bytes
    certificate: bytes
    private_key: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Key:
        """Make a new key.

        Raises:
            UserError: if the package ``cryptography`` is missing.
        """
        try:
            from cryptography.hazmat.primitives import serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as error:
            raise UserError(
                "training over several hosts needs the package cryptography to make a key: "
                "pip install 'hybridtrain[hosts]'"
            ) from error
        root, mine = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        pem = serialization.Encoding.PEM
        return cls(
            _certificate(root, root).public_bytes(pem),
            _certificate(mine, root).public_bytes(pem),
            mine.private_bytes(
                pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )

    @classmethod
    def read(cls, path: Path) -> Key:
        """Read the key file that :meth:`write` has written.

        Raises:
            UserError: if it cannot be read, is damaged, belongs to somebody else, or others may
                read it.
        """
        with open_input(path, "the key file", _MOST_BYTES) as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid():
                raise UserError(
                    f"the key file {path} belongs to user {found.st_uid}, who could join or read "
                    f"the run; this is user {os.geteuid()}: use a key file of your own"
                )
            if found.st_mode & 0o077:
                raise UserError(
                    f"other users can open the key file {path} (mode "
                    f"{found.st_mode & 0o777:04o}): chmod 600 {path}, or make a new key if "
                    "somebody may have read it"
                )
            return cls.from_bytes(file.read(), f"the key file {path}")

    def write(self, path: Path) -> None:
        """Write a new file that only this user may open.

        Raises:
            UserError: if the file exists or cannot be written.
        """
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(self.to_bytes())
                file.flush()
                os.fsync(fd)
        except FileExistsError as error:
            raise UserError(
                f"the key file {path} exists already: use it, remove it, or choose another name"
            ) from error
        except OSError as error:
            raise UserError(f"cannot write the key file {path}: {reason_of(error)}") from error

    def to_bytes(self) -> bytes:
        """All of it; keep it secret."""
        return self.authority + self.certificate + self.private_key

    @classmethod
    def from_bytes(cls, content: bytes, what: str = "the key") -> Key:
        """The opposite of :meth:`to_bytes`; ``what`` is its name in messages.

        Raises:
            UserError: if it is damaged.
        """
        content = content.replace(b"\r\n", b"\n")
        blocks = list(_BLOCK.finditer(content))
        whole = b"".join(block[0] for block in blocks) == content
        *certificates, last = [block[1] for block in blocks] or [b""]
        if not whole or len(certificates) < 2 or {*certificates} != {_CERTIFICATE}:
            raise UserError(f"{what} is damaged, or is no key: make a new one for all hosts")
        if last not in _PRIVATE:
            raise UserError(
                f"{what} ends with {last.decode()}; the private key comes last, without a password"
            )
        own = b"".join(block[0] for block in blocks[1:-1])
        key = cls(blocks[0][0], own, blocks[-1][0])
        try:
            key.check()
        except (ssl.SSLError, ValueError) as error:
            said = getattr(error, "verify_message", None)
            reason = f"holds a certificate that cannot be used: {said}" if said else "is damaged"
            raise UserError(
                f"{what} {reason}; put certificates together anew (docs/hosts.md), or make a new "
                "key for all hosts"
            ) from error
        return key

    def check(self) -> None:
        """Shake hands with itself: the authority accepts the certificate, here and now.

        Raises:
            ssl.SSLError: if not.
        """
        there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.context(server_side=False).wrap_bio(here, there)
        server = self.context(server_side=True).wrap_bio(there, here, server_side=True)
        for side in (client, server, client, server):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()

    def context(self, server_side: bool) -> ssl.SSLContext:
        """TLS 1.3, in which both sides show that they hold this key."""
        context = ssl.SSLContext(
            ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT
        )
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the key says enough, and hosts have many names
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority.decode())
        if server_side:
            context.num_tickets = 0  # nobody resumes a session; a tickets's bytes would stay unread
        fd = anonymous_descriptor()  # the library reads files only
        try:
            os.write(fd, self.certificate + self.private_key)
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context


def _certificate(key: Any, root: Any) -> x509.Certificate:
    """A certificate for ``key``, signed by ``root``; its own if both are the same."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    authority, now = key is root, datetime.datetime.now(datetime.UTC)
    usage = dict.fromkeys(
        (
            "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
            "encipher_only", "decipher_only",
        ),
        False,
    )  # fmt: skip
    return (
        x509.CertificateBuilder()
        .subject_name(name("hybridtrain run" if authority else "hybridtrain host"))
        .issuer_name(name("hybridtrain run"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))  # clocks of hosts differ
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not authority,
                key_cert_sign=authority,
                crl_sign=authority,
                **usage,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key()), critical=False
        )
        .sign(root, hashes.SHA256())
    )
