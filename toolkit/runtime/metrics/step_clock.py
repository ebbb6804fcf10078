"""Clocks that split a step into parts: every moment belongs to the innermost open part."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from deepspeed.accelerator import get_accelerator

from toolkit.run_dir.step_parts import BETWEEN_STEPS

RECEIVE = "receive"
"""Part of a pipeline stage's receives: transfer and waiting together, which `StepMeter` separates."""


@dataclass(frozen=True)
class Lap:
    """Times since the previous lap."""

    wall_seconds: float
    parts: dict[str, float]
    """Seconds by part; they sum to `wall_seconds`. Empty if this lap was not sampled."""
    hidden: dict[str, float]
    """Seconds of communication that overlapped with something else, by part."""
    receives: list[float]
    """Seconds of each receive."""


class Clock(Protocol):
    """Attributes wall time to the innermost open part."""

    watcher: Callable[[str], object] | None
    """Called with the name of each part that starts."""

    @property
    def part_name(self) -> str:
        """The innermost open part."""

    def enter(self, part: str) -> None:
        """Open a part inside the current one."""

    def leave(self) -> None:
        """Close the innermost part."""

    def hide(self, part: str, seconds: float) -> None:
        """Record communication that overlapped with something else."""

    def lap(self, *, sample_next: bool) -> Lap:
        """Finish the lap and return its times. `sample_next`: measure the parts of the next lap, if optional."""


@contextlib.contextmanager
def part(clock: Clock, name: str) -> Iterator[None]:
    """Attribute the time inside the `with` to this part."""
    clock.enter(name)
    try:
        yield
    finally:
        clock.leave()


def _inside(outer: str, part: str) -> str:
    return outer if outer in BETWEEN_STEPS else part


@dataclass
class _Totals:
    parts: dict[str, float] = field(default_factory=dict)
    hidden: dict[str, float] = field(default_factory=dict)
    receives: list[float] = field(default_factory=list)

    def add(self, name: str, seconds: float) -> None:
        self.parts[name] = self.parts.get(name, 0.0) + seconds

    def hide(self, name: str, seconds: float) -> None:
        self.hidden[name] = self.hidden.get(name, 0.0) + seconds


class NoClock:
    """Null clock: measures laps but no parts."""

    part_name = "other"

    def __init__(self) -> None:
        self.watcher: Callable[[str], object] | None = None
        self._began = time.perf_counter()

    def enter(self, part: str) -> None:
        """Ignored."""

    def leave(self) -> None:
        """Ignored."""

    def hide(self, part: str, seconds: float) -> None:
        """Ignored."""

    def lap(self, *, sample_next: bool) -> Lap:
        """Finish the lap; only its wall time is known."""
        now = time.perf_counter()
        wall, self._began = now - self._began, now
        return Lap(wall, {}, {}, [])


class HostClock:
    """Reads the host's clock at every boundary: exact if the host is the device."""

    def __init__(self) -> None:
        self.watcher: Callable[[str], object] | None = None
        self._stack = ["other"]
        self._totals = _Totals()
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
            self._totals.receives.append(seconds)

    def hide(self, part: str, seconds: float) -> None:
        self._totals.hide(part, seconds)

    def lap(self, *, sample_next: bool) -> Lap:
        self._close()
        totals, self._totals = self._totals, _Totals()
        wall, self._began = self._since - self._began, self._since
        return Lap(wall, totals.parts, totals.hidden, totals.receives)

    def _close(self) -> float:
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self._totals.add(self._stack[-1], seconds)
        return seconds


@dataclass(frozen=True)
class _Mark:
    """A boundary between parts on the device's stream."""

    event: Any
    running: str
    """The part before it."""


class DeviceClock:
    """Records events on the device's stream at the boundaries of sampled laps, and reads them at the end of the lap.

    No collective is waited for. The only wait is for the last event of a sampled lap, after the step's loss was read,
    when the device is idle anyway. Work on other streams than the main one counts as hidden.
    """

    def __init__(self, device: Any) -> None:
        self.watcher: Callable[[str], object] | None = None
        self._device = device
        self._main = device.current_stream()
        self._stack = ["other"]
        self._marks: list[_Mark] = []
        self._sides: list[tuple[str, Any, Any]] = []
        self._open: list[Any] = []
        self._totals = _Totals()
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
        """Ignored: on a device events measure overlap, not host times."""

    def lap(self, *, sample_next: bool) -> Lap:
        now = time.perf_counter()
        wall, self._began = now - self._began, now
        if self._sampled:
            self._read(wall)
        totals, self._totals = self._totals, _Totals()
        self._marks, self._sides = [], []
        self._open = [None] * len(self._open)
        self._sampled = sample_next
        if sample_next:
            self._mark()
        return Lap(wall, totals.parts, totals.hidden, totals.receives)

    def _read(self, wall: float) -> None:
        self._mark()
        self._marks[-1].event.synchronize()
        for before, after in zip(self._marks[:-1], self._marks[1:], strict=True):
            seconds = before.event.elapsed_time(after.event) / 1000
            self._totals.add(after.running, seconds)
            if after.running == RECEIVE:
                self._totals.receives.append(seconds)
        for name, start, end in self._sides:
            end.synchronize()
            self._totals.hide(name, start.elapsed_time(end) / 1000)
        rest = wall - sum(self._totals.parts.values())  # time before the first event reached the device
        self._totals.add("other", max(0.0, rest))

    def _on_main(self) -> bool:
        return bool(self._device.current_stream() == self._main)

    def _mark(self) -> None:
        self._marks.append(_Mark(self._event(), self._stack[-1]))

    def _event(self) -> Any:
        event = self._device.Event(enable_timing=True)
        event.record()
        return event


def make_clock() -> Clock:
    """The clock for this process's device."""
    device = get_accelerator()
    return HostClock() if device.device_name() == "cpu" else DeviceClock(device)
