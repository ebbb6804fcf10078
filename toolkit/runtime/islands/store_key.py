"""The key of an update store: a secret that all islands of a run share, and the certificate of its server.

`toolkit mailbox --init DIR` writes two files that only their owner can read: `server.pem` (certificate and private key)
stays with the server, `islands.key` (secret and certificate) is copied to every island.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import BadInput

ISLANDS_KEY, SERVER_KEY = "islands.key", "server.pem"
SECRET_BYTES = 32
DAYS = 397
"""Days that a certificate is valid: the longest that browsers and TLS libraries accept everywhere."""
LARGEST_BYTES = 64 << 10
_PREFIX = "secret: "


@dataclass(frozen=True)
class StoreKey:
    """What an island needs to be let in."""

    secret: bytes
    certificate: str = ""
    """PEM of the server's certificate; empty for directories and buckets, which have no server of ours."""

    def __repr__(self) -> str:
        return "StoreKey(…)"  # never the secret, wherever it is printed

    def write(self, path: Path) -> None:
        """Write the key to a new file that only its owner can read."""
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="ascii") as file:
            file.write(f"{_PREFIX}{self.secret.hex()}\n{self.certificate}")


def access_token(key: StoreKey) -> str:
    """What an island shows to the server: it proves the secret, and signs nothing."""
    return hmac.new(key.secret, b"access", hashlib.sha256).hexdigest()


def new_key() -> StoreKey:
    """A key with a new secret, without a certificate."""
    return StoreKey(secrets.token_bytes(SECRET_BYTES))


def read_key(path: str | Path) -> StoreKey:
    """Read the key of an island; raises `BadInput` if the file is not one, or if others can read it."""
    where = Path(path)
    try:
        status = where.stat()
        if status.st_mode & 0o077:
            raise BadInput("--mailbox-key", f"{where} can be read by others; chmod 600 {where}")
        if status.st_size > LARGEST_BYTES:
            raise BadInput("--mailbox-key", f"{where} has {status.st_size} bytes; {_required()}")
        first, _, rest = where.read_text(encoding="ascii").partition("\n")
    except OSError as error:
        raise BadInput("--mailbox-key", f"{where} can't be read: {error.strerror}; {_required()}") from None
    except UnicodeDecodeError:
        raise BadInput("--mailbox-key", f"{where} is not a key; {_required()}") from None
    try:
        secret = bytes.fromhex(first.removeprefix(_PREFIX)) if first.startswith(_PREFIX) else b""
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise BadInput("--mailbox-key", f"{where} is not a key; {_required()}")
    return StoreKey(secret, rest)


def _required() -> str:
    return f"the file {ISLANDS_KEY} that `toolkit mailbox --init DIR` has written is required"


def make_keys(folder: Path, hosts: Sequence[str]) -> None:
    """Write the keys of a new store: a secret, and a certificate for these host names and addresses."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        certificate, private = _certificate(hosts)
        with os.fdopen(os.open(folder / SERVER_KEY, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(private + certificate)
        StoreKey(secrets.token_bytes(SECRET_BYTES), certificate.decode("ascii")).write(folder / ISLANDS_KEY)
    except FileExistsError:
        raise BadInput("--init", f"{folder} holds keys already; remove them, or name another directory") from None
    except OSError as error:
        raise BadInput("--init", f"{folder} can't be written: {error.strerror}") from None


def _certificate(hosts: Sequence[str]) -> tuple[bytes, bytes]:
    """(certificate, private key) in PEM, signed by itself: islands trust this one certificate and no authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "toolkit update store")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of other hosts may be behind
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return built.public_bytes(serialization.Encoding.PEM), private


def _general_name(host: str):  # type: ignore[no-untyped-def]
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
