"""Where a rank's time goes: every moment belongs to one part of the step, the innermost that is entered."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from deepspeed.accelerator import get_accelerator

from toolkit.run_dir.step_parts import BETWEEN_STEPS

RECEIVE = "receive"
"""A receive of a pipeline stage: transfer and waiting in one, told apart later."""


@dataclass(frozen=True)
class Lap:
    """The time since the lap before."""

    wall_seconds: float
    parts: dict[str, float]
    """Seconds by part; they sum to `wall_seconds`. Empty where this lap was not looked at."""
    hidden: dict[str, float]
    """Seconds of communication that ran beside something else."""
    receives: list[float]
    """Seconds of each receive."""


class Clock(Protocol):
    """Told which part of a step is running."""

    watcher: Callable[[str], object] | None
    """Told of each part that begins, if there is one."""

    @property
    def part_name(self) -> str:
        """The innermost part."""

    def enter(self, part: str) -> None:
        """A part begins inside the one that runs."""

    def leave(self) -> None:
        """It ends."""

    def hide(self, part: str, seconds: float) -> None:
        """Communication ran for so long beside something else."""

    def lap(self, *, sample_next: bool) -> Lap:
        """Close the books; `sample_next`: look at the next lap closely, if that is a choice."""


@contextlib.contextmanager
def part(clock: Clock, name: str) -> Iterator[None]:
    """`name` is what runs inside the `with`."""
    clock.enter(name)
    try:
        yield
    finally:
        clock.leave()


def _inside(outer: str, part: str) -> str:
    return outer if outer in BETWEEN_STEPS else part


@dataclass
class _Books:
    parts: dict[str, float] = field(default_factory=dict)
    hidden: dict[str, float] = field(default_factory=dict)
    receives: list[float] = field(default_factory=list)

    def add(self, name: str, seconds: float) -> None:
        self.parts[name] = self.parts.get(name, 0.0) + seconds

    def hide(self, name: str, seconds: float) -> None:
        self.hidden[name] = self.hidden.get(name, 0.0) + seconds


class NoClock:
    """Where nobody looks."""

    part_name = "other"

    def __init__(self) -> None:
        self.watcher: Callable[[str], object] | None = None
        self._began = time.perf_counter()

    def enter(self, part: str) -> None:
        """Nothing."""

    def leave(self) -> None:
        """Nothing."""

    def hide(self, part: str, seconds: float) -> None:
        """Nothing."""

    def lap(self, *, sample_next: bool) -> Lap:
        """The time alone."""
        now = time.perf_counter()
        wall, self._began = now - self._began, now
        return Lap(wall, {}, {}, [])


class HostClock:
    """Reads the host's clock at every border: exact where the host is the device."""

    def __init__(self) -> None:
        self.watcher: Callable[[str], object] | None = None
        self._stack = ["other"]
        self._books = _Books()
        self._began = self._since = time.perf_counter()

    @property
    def part_name(self) -> str:
        return self._stack[-1]

    def enter(self, part: str) -> None:
        self._close()
        if self.watcher is not None:
            self.watcher(part)
        self._stack.append(_inside(self._stack[-1], part))

    def leave(self) -> None:
        seconds = self._close()
        if self._stack.pop() == RECEIVE:
            self._books.receives.append(seconds)

    def hide(self, part: str, seconds: float) -> None:
        self._books.hide(part, seconds)

    def lap(self, *, sample_next: bool) -> Lap:
        self._close()
        books, self._books = self._books, _Books()
        wall, self._began = self._since - self._began, self._since
        return Lap(wall, books.parts, books.hidden, books.receives)

    def _close(self) -> float:
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self._books.add(self._stack[-1], seconds)
        return seconds


@dataclass(frozen=True)
class _Mark:
    """A border on a stream of the device."""

    event: Any
    running: str
    """What ran before it."""


class DeviceClock:
    """Puts events on the device's stream at the borders of sampled laps, and reads them when the lap is over.

    Nothing waits for a collective: the one wait is for the last event of a sampled lap, after the step's loss was read,
    when the device has nothing left to do. What runs on another stream than the main one is hidden behind it.
    """

    def __init__(self, device: Any) -> None:
        self.watcher: Callable[[str], object] | None = None
        self._device = device
        self._main = device.current_stream()
        self._stack = ["other"]
        self._marks: list[_Mark] = []
        self._sides: list[tuple[str, Any, Any]] = []
        self._open: list[Any] = []
        self._books = _Books()
        self._sampled = False
        self._began = time.perf_counter()

    @property
    def part_name(self) -> str:
        return self._stack[-1]

    def enter(self, part: str) -> None:
        if self.watcher is not None:
            self.watcher(part)
        on_main = self._on_main()
        if self._sampled and on_main:
            self._mark()
        self._open.append(None if on_main or not self._sampled else self._event())
        self._stack.append(_inside(self._stack[-1], part))

    def leave(self) -> None:
        start = self._open.pop()
        if start is not None:
            self._sides.append((self._stack[-1], start, self._event()))
        elif self._sampled and self._on_main():
            self._mark()
        self._stack.pop()

    def hide(self, part: str, seconds: float) -> None:
        """The host's time says nothing here: events do."""

    def lap(self, *, sample_next: bool) -> Lap:
        now = time.perf_counter()
        wall, self._began = now - self._began, now
        if self._sampled:
            self._read(wall)
        books, self._books = self._books, _Books()
        self._marks, self._sides = [], []
        self._open = [None] * len(self._open)
        self._sampled = sample_next
        if sample_next:
            self._mark()
        return Lap(wall, books.parts, books.hidden, books.receives)

    def _read(self, wall: float) -> None:
        self._mark()
        self._marks[-1].event.synchronize()
        for before, after in zip(self._marks[:-1], self._marks[1:], strict=True):
            seconds = before.event.elapsed_time(after.event) / 1000
            self._books.add(after.running, seconds)
            if after.running == RECEIVE:
                self._books.receives.append(seconds)
        for name, start, end in self._sides:
            end.synchronize()
            self._books.hide(name, start.elapsed_time(end) / 1000)
        rest = wall - sum(self._books.parts.values())  # before the first event reached the device
        self._books.add("other", max(0.0, rest))

    def _on_main(self) -> bool:
        return bool(self._device.current_stream() == self._main)

    def _mark(self) -> None:
        self._marks.append(_Mark(self._event(), self._stack[-1]))

    def _event(self) -> Any:
        event = self._device.Event(enable_timing=True)
        event.record()
        return event


def make_clock() -> Clock:
    """The clock that fits this process's device."""
    device = get_accelerator()
    return HostClock() if device.device_name() == "cpu" else DeviceClock(device)
