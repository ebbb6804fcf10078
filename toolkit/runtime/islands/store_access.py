"""Who may enter an update store: the key that all islands of a run share, and the HTTPS server that asks for it.

`toolkit mailbox --init DIR` writes two files that only their owner can read: `server.pem` (certificate and private key)
stays with the server, `islands.key` (secret and certificate) is copied to every island.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import hmac
import ipaddress
import os
import secrets
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import BadInput

if TYPE_CHECKING:
    from aiohttp import web

ISLANDS_KEY, SERVER_KEY = "islands.key", "server.pem"
SECRET_BYTES = 32
DAYS = 397
"""Days that a certificate is valid: the longest that browsers and TLS libraries accept everywhere."""
LARGEST_KEY_BYTES = 64 << 10
LARGEST_BYTES = 8 << 20
"""Largest value of a store; more is refused before it is read."""
ACCESS = "Bearer "
_PREFIX, _ENCRYPTS = "secret: ", "encrypt: true\n"


@dataclass(frozen=True)
class StoreKey:
    """What an island needs to be let in."""

    secret: bytes
    certificate: str = ""
    """PEM of the server's certificate; empty for directories and buckets, which have no server of ours."""
    encrypts: bool = False
    """Whether values are encrypted before they leave the island: at rest, nobody reads them without the secret."""

    def __repr__(self) -> str:
        return "StoreKey(…)"  # never the secret, wherever it is printed

    def write(self, path: Path) -> None:
        """Write the key to a new file that only its owner can read."""
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="ascii") as file:
            file.write(f"{_PREFIX}{self.secret.hex()}\n{_ENCRYPTS if self.encrypts else ''}{self.certificate}")


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
        if status.st_size > LARGEST_KEY_BYTES:
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
    return StoreKey(secret, rest.removeprefix(_ENCRYPTS), rest.startswith(_ENCRYPTS))


def _required() -> str:
    return f"the file {ISLANDS_KEY} that `toolkit mailbox --init DIR` has written is required"


def make_keys(folder: Path, hosts: Sequence[str], days: float = DAYS, *, encrypts: bool = False) -> None:
    """Write the keys of a new store: a secret, and a certificate for these host names and addresses."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        certificate, private = _certificate(hosts, days)
        with os.fdopen(os.open(folder / SERVER_KEY, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(private + certificate)
        key = StoreKey(secrets.token_bytes(SECRET_BYTES), certificate.decode("ascii"), encrypts)
        key.write(folder / ISLANDS_KEY)
    except FileExistsError:
        raise BadInput("--init", f"{folder} holds keys already; remove them, or name another directory") from None
    except OSError as error:
        raise BadInput("--init", f"{folder} can't be written: {error.strerror}") from None


def _certificate(hosts: Sequence[str], days: float) -> tuple[bytes, bytes]:
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
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return built.public_bytes(serialization.Encoding.PEM), private


def _general_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


LONGEST_KEY = 512
MOST_REQUESTS = 256
"""Requests that are handled at a time; more are asked to come again."""


@dataclass
class Values:
    """All values of a store, up to a number of bytes."""

    most_bytes: int
    held: dict[str, bytes] = field(default_factory=dict)
    num_bytes: int = 0

    def has_room(self, key: str, value: bytes) -> bool:
        """Whether a value fits in place of the one that is there."""
        return self.num_bytes + self._growth(key, value) <= self.most_bytes

    def put(self, key: str, value: bytes) -> None:
        """Write a value."""
        self.num_bytes += self._growth(key, value)
        self.held[key] = value

    def delete(self, key: str) -> None:
        """Remove a value, if it is there."""
        found = self.held.pop(key, None)
        self.num_bytes -= 0 if found is None else len(found) + len(key)

    def _growth(self, key: str, value: bytes) -> int:
        found = self.held.get(key)
        return len(value) - len(found) if found is not None else len(value) + len(key)


def make_app(token: str, most_bytes: int) -> web.Application:
    """The application: PUT (with `If-None-Match: *` only if absent), GET and DELETE of `/KEY`."""
    from aiohttp import web

    values, busy = Values(most_bytes), asyncio.Semaphore(MOST_REQUESTS)

    @web.middleware  # type: ignore[untyped-decorator]
    async def guard(request: web.Request, handler: Any) -> Any:
        shown = request.headers.get("Authorization", "")
        if not hmac.compare_digest(shown.encode(errors="replace"), (ACCESS + token).encode()):
            return web.Response(status=401, text="unknown secret")  # before a byte of the body is read
        if len(request.match_info.get("key", "")) > LONGEST_KEY:
            return web.Response(status=414, text=f"keys have at most {LONGEST_KEY} characters")
        if busy.locked():
            return web.Response(status=503, text="too many requests at a time")
        async with busy:
            return await handler(request)

    async def put(request: web.Request) -> web.Response:
        key, value = request.match_info["key"], await request.read()
        if key in values.held and request.headers.get("If-None-Match") == "*":
            return web.Response(status=412)
        if not values.has_room(key, value):
            return web.Response(status=507, text=f"the store holds at most {most_bytes} bytes")
        values.put(key, value)
        return web.Response(status=204)

    async def get(request: web.Request) -> web.Response:
        found = values.held.get(request.match_info["key"])
        return web.Response(status=404) if found is None else web.Response(body=found)

    async def delete(request: web.Request) -> web.Response:
        values.delete(request.match_info["key"])
        return web.Response(status=204)

    app = web.Application(middlewares=[guard], client_max_size=LARGEST_BYTES)
    app.router.add_put("/{key:.+}", put)
    app.router.add_get("/{key:.+}", get)
    app.router.add_delete("/{key:.+}", delete)
    return app


def server_context(folder: Path) -> ssl.SSLContext:
    """TLS 1.3 with the certificate of the folder."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(folder / SERVER_KEY)
    except (OSError, ssl.SSLError) as error:
        what = f"{folder / SERVER_KEY} can't be used: {error}; `toolkit mailbox --init {folder}` writes it"
        raise BadInput("--keys", what) from None
    return context


class StoreServer:
    """Serves a store at one address, in the thread that calls `run`."""

    def __init__(self, host: str, port: int, folder: Path, most_bytes: int) -> None:
        self._host, self._port, self._most_bytes = host, port, most_bytes
        self._context = server_context(folder)
        self._token = access_token(read_key(folder / ISLANDS_KEY))
        self._ended: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, ready: Callable[[int], None]) -> None:
        """Serve until `stop`; `ready` is called with the port once the socket listens."""
        asyncio.run(self._serve(ready))

    def stop(self) -> None:
        """End the server; may be called from another thread or a signal handler."""
        if self._loop is not None and self._ended is not None:
            self._loop.call_soon_threadsafe(self._ended.set)

    async def _serve(self, ready: Callable[[int], None]) -> None:
        from aiohttp import web

        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        runner = web.AppRunner(make_app(self._token, self._most_bytes), access_log=None, keepalive_timeout=75)
        await runner.setup()
        site = web.TCPSite(runner, self._host, self._port, ssl_context=self._context)
        try:
            await site.start()
            ready(runner.addresses[0][1])
            await self._ended.wait()
        finally:
            await runner.cleanup()
