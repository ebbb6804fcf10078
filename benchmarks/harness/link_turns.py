"""A link whose limit is switched on and off during one run: its speed with and without, in the same minutes."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from benchmarks.harness.slow_link import Link
from benchmarks.paired import Ratio, ratio


def set_limit(link: Link, mbit: int | None) -> None:
    """Limit what both sides send, or lift the limit."""
    for side in (0, 1):
        inside = ("ip", "netns", "exec", link.space(side), "tc", "qdisc")
        subprocess.run([*inside, "del", "dev", "eth0", "root"], capture_output=True)  # there is none at first
        if mbit:
            how = ("tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms")
            subprocess.run([*inside, "add", "dev", "eth0", "root", *how], check=True)


@dataclass(frozen=True)
class Span:
    """A time with or without the limit, in seconds since 1970."""

    begin: float
    end: float
    limited: bool


class Turns:
    """Switches the limit every so many seconds while a run goes on."""

    def __init__(self, link: Link, mbit: int, seconds: float) -> None:
        self._link, self._mbit, self._seconds = link, mbit, seconds
        self.spans: list[Span] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Turns:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        limited = True
        while not self._over.is_set():
            set_limit(self._link, self._mbit if limited else None)
            begin = time.time()
            if not self._over.wait(self._seconds):
                self.spans.append(Span(begin, time.time(), limited))
            limited = not limited

    def speed_kept(self, records: Iterable[Mapping[str, Any]]) -> tuple[Ratio, int]:
        """Tokens per second with the limit over those without, neighbouring turns compared; steps that count."""
        steps = list(records)[3:]
        found: list[tuple[bool, float]] = []
        count = 0
        for span in self.spans:
            inside = [s for s in steps if s["time"] - s["wall_seconds"] >= span.begin and s["time"] <= span.end]
            if seconds := sum(step["wall_seconds"] for step in inside):
                found.append((span.limited, sum(step["tokens"] for step in inside) / seconds))
                count += len(inside)
        pairs = [
            (one[1], two[1]) if one[0] else (two[1], one[1])
            for one, two in zip(found[::2], found[1::2], strict=False)
            if one[0] != two[0]
        ]
        return ratio(pairs), count
