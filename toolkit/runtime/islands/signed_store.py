"""Signed values and counters over a transport: what the holder of the secret has not written does not exist.

A value is stored as signature, version and content. The signature (HMAC-SHA256) covers the key, the version and the
content, so that nothing can be moved to another key or another run. Versions only grow: an older value that somebody
puts back is ignored. If the key asks for it, content is encrypted (AES-256-GCM) with a key derived from the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
import time
from collections import Counter
from typing import Any

from toolkit.runtime.islands.store_access import StoreKey
from toolkit.runtime.islands.transports import Transport

_SIGNATURE_BYTES = hashlib.sha256().digest_size
_HEAD = struct.Struct(">Q")


class _Cipher:
    """AES-256-GCM with a random nonce in front of every value; the store's key is bound to it."""

    _NONCE_BYTES = 12

    def __init__(self, secret: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aes = AESGCM(hmac.digest(secret, b"encryption", "sha256"))

    def encrypt(self, key: str, content: bytes) -> bytes:
        nonce = secrets.token_bytes(self._NONCE_BYTES)
        return nonce + bytes(self._aes.encrypt(nonce, content, key.encode()))

    def decrypt(self, key: str, content: bytes) -> bytes:
        nonce, sealed = content[: self._NONCE_BYTES], content[self._NONCE_BYTES :]
        return bytes(self._aes.decrypt(nonce, sealed, key.encode()))


class SignedStore:
    """One thread's connection; `rejected` counts values with a wrong signature or an old version, by key."""

    def __init__(self, transport: Transport, key: StoreKey) -> None:
        self._transport, self._secret = transport, key.secret
        self._cipher = _Cipher(key.secret) if key.encrypts else None
        self._known: dict[str, int] = {}
        """Counters as last seen; they never shrink."""
        self._versions: dict[str, int] = {}
        """Newest version of every JSON value that was read."""
        self.rejected: Counter[str] = Counter()

    def create(self, key: str, content: bytes) -> bool:
        """Write a value unless the key holds one; whether it was written. What is not signed makes room."""
        while not self._transport.create(key, self._sealed(key, content)):
            if self.get(key) is not None:
                return False
            self._transport.delete(key)
        return True

    def put(self, key: str, content: bytes) -> None:
        """Write a value."""
        self._transport.put(key, self._sealed(key, content))

    def get(self, key: str) -> bytes | None:
        """The content; None if the key is absent, or its value is not one of this run."""
        found = self._transport.get(key)
        if found is None:
            return None
        opened = self._opened(key, found)
        if opened is None:
            self.rejected[key] += 1
            return None
        return opened[1]

    def delete(self, key: str) -> None:
        """Remove a value."""
        self._transport.delete(key)

    def write(self, key: str, value: Any) -> None:
        """Write a small value as JSON."""
        self.put(key, json.dumps(value).encode())

    def read(self, key: str, default: Any = None) -> Any:
        """Read a JSON value; `default` if the key is absent."""
        found = self._transport.get(key)
        opened = None if found is None else self._opened(key, found)
        if found is not None and (opened is None or opened[0] < self._versions.get(key, 0)):
            self.rejected[key] += 1
            opened = None
        if opened is None:
            return default
        self._versions[key] = opened[0]
        return json.loads(opened[1])

    def number(self, key: str, plus: int = 0) -> int:
        """Add `plus` to a shared counter and return it; counters start at 0.

        A counter is a row of markers `KEY/1`, `KEY/2`, … of which each is created once.
        """
        count = self._last(key, self._known.get(key, 0))
        for _ in range(plus):
            while not self.create(f"{key}/{count + 1}", b""):
                count += 1
            count += 1
        self._known[key] = count
        return count

    def _last(self, key: str, known: int) -> int:
        """The last marker of a counter, of which `known` exists.

        In strides that double, then halve: an island that joins after thousands of rounds asks some twenty times.
        """
        stride = 1
        while self.exists(f"{key}/{known + stride}"):
            known, stride = known + stride, 2 * stride
        while stride > 1:
            stride //= 2
            known += stride if self.exists(f"{key}/{known + stride}") else 0
        return known

    def exists(self, key: str) -> bool:
        """Whether a key holds a value of this run."""
        return self.get(key) is not None

    def first(self, key: str) -> bool:
        """Whether this is the first call with this key, over all islands."""
        return self.create(key, b"")

    def _sealed(self, key: str, content: bytes) -> bytes:
        content = content if self._cipher is None else self._cipher.encrypt(key, content)
        body = _HEAD.pack(time.time_ns()) + content
        return self._signature(key, body) + body

    def _opened(self, key: str, found: bytes) -> tuple[int, bytes] | None:
        """(version, content) of a value; None if it was not signed for this key."""
        signature, body = found[:_SIGNATURE_BYTES], found[_SIGNATURE_BYTES:]
        if len(body) < _HEAD.size or not hmac.compare_digest(signature, self._signature(key, body)):
            return None
        content = body[_HEAD.size :]
        if self._cipher is not None:
            content = self._cipher.decrypt(key, content)
        return _HEAD.unpack_from(body)[0], content

    def _signature(self, key: str, body: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + body, "sha256")
