"""Surroundings in which a run fails: a small file system, slow syncs, clocks that jump, a full control group."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SLOW_FSYNC = "import os, time\nreal = os.fsync\nos.fsync = lambda number: (time.sleep(0.3), real(number))[1]\n"
CLOCK_JUMPS = """
import os, random, time
real, begun = time.time, time.monotonic()
def jumping():
    second = int(time.monotonic())
    return real() + (0 if second < begun + 4 else random.Random(second ^ os.getpid()).uniform(-9e3, 9e3))
time.time = jumping
"""
BALLAST_BYTES = 64 << 20
ROOM_BYTES = 16 << 20


@contextmanager
def mounted(path: Path, size_bytes: int) -> Iterator[Path]:
    """A small file system of its own."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
        path.rmdir()


@contextmanager
def injected(code: str) -> Iterator[dict[str, str]]:
    """Variables with which every Python process executes some code first."""
    with tempfile.TemporaryDirectory(prefix="injected-") as directory:
        (Path(directory) / "sitecustomize.py").write_text(code)
        yield {"PYTHONPATH": directory}


@dataclass(frozen=True)
class MemoryGroup:
    """A control group, without a limit at first."""

    path: Path
    limit: str
    usage: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Start of a command line that runs the rest in the group."""
        return ("sh", "-c", f'echo $$ > {self.path}/cgroup.procs; exec "$0" "$@"')

    def fill(self) -> subprocess.Popen[bytes]:
        """Leave little room, and start a process that needs more: the kernel ends the largest process of the group."""
        for _ in range(20):  # version 1 refuses a limit below what is in use, and usage grows meanwhile
            try:
                (self.path / self.limit).write_text(str(int((self.path / self.usage).read_text()) + ROOM_BYTES))
                break
            except OSError:
                time.sleep(0.05)
        code = f"import time; held = bytearray({BALLAST_BYTES}); time.sleep(3)"
        return subprocess.Popen([*self.prefix, sys.executable, "-S", "-c", code])


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A new control group; it is removed, with what is left in it, at the end."""
    old = Path("/sys/fs/cgroup/memory")  # version 1
    parent = old if old.is_dir() else Path("/sys/fs/cgroup")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old.is_dir() else ("memory.max", "memory.current")
    group = MemoryGroup(parent / f"toolkit-faults-{os.getpid()}", *names)
    group.path.mkdir()
    try:
        yield group
    finally:
        deadline = time.monotonic() + 10
        while (group.path / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        group.path.rmdir()
