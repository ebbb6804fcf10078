"""The HTTPS server of an update store: values in memory, for those who know the run's secret."""

from __future__ import annotations

import asyncio
import hmac
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import BadInput
from toolkit.runtime.islands.store_key import ISLANDS_KEY, SERVER_KEY, access_token, read_key
from toolkit.runtime.islands.transports import ACCESS, LARGEST_BYTES

if TYPE_CHECKING:
    from aiohttp import web

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

    @web.middleware
    async def guard(request: web.Request, handler):  # type: ignore[no-untyped-def]
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

    def run(self, ready) -> None:  # type: ignore[no-untyped-def]
        """Serve until `stop`; `ready` is called with the port once the socket listens."""
        asyncio.run(self._serve(ready))

    def stop(self) -> None:
        """End the server; may be called from another thread or a signal handler."""
        if self._loop is not None and self._ended is not None:
            self._loop.call_soon_threadsafe(self._ended.set)

    async def _serve(self, ready) -> None:  # type: ignore[no-untyped-def]
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
