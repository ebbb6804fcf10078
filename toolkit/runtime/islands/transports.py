"""Where asynchronous islands meet: an HTTPS server of the toolkit, or a directory or bucket that all can reach.

A transport stores bytes under keys. One operation must be atomic: `create` succeeds for one caller only. Everything
else, counters included, is built on it (`signed_store.py`), so that plain object stores are enough.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, unquote, urlsplit

from toolkit.errors import BadInput, RankFailed
from toolkit.runtime.islands.store_access import ACCESS, LARGEST_BYTES, StoreKey, access_token

PATIENCE_SECONDS = 60.0
"""How long a store that does not answer is asked again."""
PAUSE_SECONDS = 0.5

Found = TypeVar("Found")


class Transport(Protocol):
    """Bytes under keys. A connection serves one thread at a time."""

    def create(self, key: str, value: bytes) -> bool:
        """Write a value unless the key exists; whether it was written. Atomic over all callers."""

    def put(self, key: str, value: bytes) -> None:
        """Write a value, whatever was there."""

    def get(self, key: str) -> bytes | None:
        """The value; None if the key is absent or the value larger than `LARGEST_BYTES`."""

    def delete(self, key: str) -> None:
        """Remove a key; one that is absent is left alone."""


def open_transport(address: str, key: StoreKey, patience_seconds: float = PATIENCE_SECONDS) -> Transport:
    """Connect to the store at an address, as `parse_address` returns it."""
    scheme = urlsplit(address).scheme
    if scheme == "https":
        return HttpsTransport(address, key, patience_seconds)
    return FolderTransport(address) if scheme == "file" else BucketTransport(address, patience_seconds)


def refused(address: str, why: str) -> BadInput:
    """The error of a store that does not let this island in."""
    return BadInput("--mailbox", f"{address}: {why}")


class FolderTransport:
    """A directory of this host or a shared file system.

    By hand, because islands of one host meet here by default and should need no further package: a value is written to
    a file of its own name and becomes visible by a hard link, which fails if the key exists, or by a rename.
    """

    def __init__(self, address: str) -> None:
        self._address, self._root = address, Path(unquote(urlsplit(address).path))
        self._serial = 0
        with self._refusing():
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def create(self, key: str, value: bytes) -> bool:
        with self._refusing(), self._written(key, value) as path:
            try:
                os.link(path, self._root / key)
            except FileExistsError:
                return False
            return True

    def put(self, key: str, value: bytes) -> None:
        with self._refusing(), self._written(key, value) as path:
            os.replace(path, self._root / key)

    def get(self, key: str) -> bytes | None:
        with self._refusing():
            try:
                with open(self._root / key, "rb") as file:
                    found = file.read(LARGEST_BYTES + 1)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None
            return found if len(found) <= LARGEST_BYTES else None

    def delete(self, key: str) -> None:
        with self._refusing():
            (self._root / key).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _written(self, key: str, value: bytes) -> Iterator[Path]:
        """A file with the value beside the key's own; gone afterwards."""
        self._serial += 1
        target = self._root / key
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unique = f".{target.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}.{self._serial}"
        path = target.with_name(unique)
        try:
            path.write_bytes(value)
            yield path
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise refused(self._address, f"can't be used: {error.strerror or error}") from None


class BucketTransport:
    """A bucket, through obstore: conditional writes on S3, Google Cloud and Azure."""

    def __init__(self, address: str, patience_seconds: float) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise refused(address, "needs the package obstore: pip install 'zero-toolkit[islands]'") from None
        self._address, self._patience_seconds = address, patience_seconds
        self._obstore, self._errors = obstore, obstore.exceptions
        try:
            self._store: Any = from_url(address)
        except (self._errors.BaseError, ValueError, OSError) as error:
            raise refused(address, f"can't be opened: {_first_line(error)}") from None

    def create(self, key: str, value: bytes) -> bool:
        try:
            self._asked(lambda: self._obstore.put(self._store, key, value, mode="create"))
        except self._errors.AlreadyExistsError:
            return False
        return True

    def put(self, key: str, value: bytes) -> None:
        self._asked(lambda: self._obstore.put(self._store, key, value))

    def get(self, key: str) -> bytes | None:
        try:
            found = self._asked(lambda: self._obstore.get(self._store, key))
            if found.meta["size"] > LARGEST_BYTES:
                return None
            return self._asked(lambda: bytes(found.bytes()))
        except FileNotFoundError:
            return None

    def delete(self, key: str) -> None:
        try:
            self._asked(lambda: self._obstore.delete(self._store, key))
        except FileNotFoundError:
            return

    def _asked(self, ask: Callable[[], Found]) -> Found:
        """The answer; a store that fails is asked again for a while."""
        errors = self._errors
        final = (errors.PermissionDeniedError, errors.UnauthenticatedError, errors.InvalidPathError)
        deadline = time.monotonic() + self._patience_seconds
        while True:
            try:
                return ask()
            except (errors.AlreadyExistsError, FileNotFoundError):
                raise
            except final as error:
                raise refused(self._address, f"refuses this island: {_first_line(error)}") from None
            except (errors.BaseError, OSError) as error:
                if time.monotonic() > deadline:
                    raise RankFailed(f"the update store {self._address} fails: {_first_line(error)}") from None
                time.sleep(PAUSE_SECONDS)


class HttpsTransport:
    """The server of `toolkit mailbox`: TLS with one pinned certificate, and access by the run's secret."""

    def __init__(self, address: str, key: StoreKey, patience_seconds: float) -> None:
        import httpx

        if not key.certificate:
            raise refused(address, "the key has no certificate; use the key that `toolkit mailbox --init` has written")
        try:
            context = ssl.create_default_context(cadata=key.certificate)
        except ssl.SSLError:
            raise refused(address, "the certificate in the key is damaged") from None
        self._address, self._patience_seconds = address.rstrip("/"), patience_seconds
        # trust_env=False: a proxy or another certificate authority in the environment must not get in between.
        self._client = httpx.Client(
            verify=context, trust_env=False, timeout=60.0, headers={"Authorization": ACCESS + access_token(key)}
        )

    def create(self, key: str, value: bytes) -> bool:
        return bool(self._asked("PUT", key, value, {"If-None-Match": "*"}).status_code != 412)

    def put(self, key: str, value: bytes) -> None:
        self._asked("PUT", key, value)

    def get(self, key: str) -> bytes | None:
        found = self._asked("GET", key)
        return None if found.status_code == 404 else bytes(found.content)

    def delete(self, key: str) -> None:
        self._asked("DELETE", key)

    def _asked(self, method: str, key: str, value: bytes | None = None, headers: dict[str, str] | None = None) -> Any:
        import httpx

        deadline = time.monotonic() + self._patience_seconds
        while True:
            try:
                found = self._client.request(
                    method, f"{self._address}/{quote(key)}", content=value, headers=headers or {}
                )
            except httpx.TransportError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    raise refused(self._address, f"shows another certificate than the key's: {error}") from None
                if time.monotonic() > deadline:
                    raise RankFailed(f"the update store {self._address} can't be reached: {error}") from None
                time.sleep(PAUSE_SECONDS)
                continue
            if found.status_code in (401, 403):
                raise refused(self._address, "does not accept this island's secret; use the key of this run")
            if found.status_code in (200, 201, 204, 404, 412):
                return found
            if found.status_code != 503 or time.monotonic() > deadline:
                raise RankFailed(f"the update store {self._address} answers {found.status_code}: {found.text[:200]}")
            time.sleep(PAUSE_SECONDS)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
