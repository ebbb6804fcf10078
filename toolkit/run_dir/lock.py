"""One run per run directory: a lock file with the host, process and start time of whoever runs in it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from toolkit.errors import BadInput
from toolkit.run_dir.layout import LOCK, make_private, read_json

SILENT_SECONDS = 120.0
"""A lock of another host is stale if neither it nor a heartbeat has been written for this long."""


@dataclass(frozen=True)
class Holder:
    """The process that runs in a run directory."""

    host: str
    pid: int
    started: str
    """Start time of the process, so that another one with the same process id is not taken for it."""


@contextmanager
def hold(path: Path, say: Callable[[str], object], name: str = LOCK) -> Iterator[None]:
    """Hold the lock of a run directory, which is made if needed; `BadInput` names the run that has it.

    `say` hears of a stale lock, which is replaced.
    """
    if path.exists() and not path.is_dir():  # the caller refuses it, and says more
        yield
        return
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    mine = Holder(socket.gethostname(), os.getpid(), start_time(os.getpid()))
    try:
        make_private(path)
        _take(path / name, mine, say)
    except OSError as error:
        raise BadInput("output", f"{path} can't be written: {error.strerror}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if _read(path / name) == mine:
                (path / name).unlink()
            for folder in made:
                folder.rmdir()  # fails, as it should, if a run was written


def _take(file: Path, mine: Holder, say: Callable[[str], object]) -> None:
    for _ in range(3):
        try:
            _create(file, json.dumps(asdict(mine)))
        except FileExistsError:
            _remove_if_stale(file, say)
            continue
        return
    raise BadInput("--run-dir", f"{file} is being taken by another run; choose another directory")


def _create(file: Path, text: str) -> None:
    """Write a new file that appears with its contents: an empty lock would be taken for a stale one."""
    descriptor, name = tempfile.mkstemp(prefix=f"{file.name}.", dir=file.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as lock:
            lock.write(text)
        os.chmod(name, 0o644)
        try:
            os.link(name, file)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w", encoding="utf-8") as lock:
                lock.write(text)
    finally:
        os.unlink(name)


def _remove_if_stale(file: Path, say: Callable[[str], object]) -> None:
    """Remove the lock of a run that is gone; `BadInput` if it is there."""
    holder = _read(file)
    if holder is not None and not _is_gone(holder, file):
        raise BadInput(
            "--run-dir",
            f"{file.parent} is in use by the run of process {holder.pid} on {holder.host}; two runs would damage each "
            f"other: wait for it, stop it, or choose another directory (if that host is gone for good, remove {file})",
        )
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(file, aside)
        found = _read(aside)
        if found != holder:  # another run replaced the stale lock first: give it back
            os.rename(aside, file)
            return
        aside.unlink()
    who = f"of process {holder.pid} on {holder.host}, which is gone" if holder else "that can't be read"
    say(f"replacing the stale lock {file} {who}")


def _read(file: Path) -> Holder | None:
    found = read_json(file)
    host, pid, started = found.get("host"), found.get("pid"), found.get("started")
    if isinstance(host, str) and type(pid) is int and pid > 0 and isinstance(started, str):
        return Holder(host, pid, started)
    return None


def _is_gone(holder: Holder, file: Path) -> bool:
    if holder.host == socket.gethostname():
        return start_time(holder.pid) != holder.started
    beats = [*file.parent.glob("heartbeats/*.json"), *file.parent.glob("islands/*/heartbeats/*.json")]
    with tempfile.NamedTemporaryFile(dir=file.parent) as now:  # the clock of the file system, which writes all times
        ages = [os.fstat(now.fileno()).st_mtime - _modified(each) for each in [file, *beats]]
    return min(ages) > SILENT_SECONDS


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def start_time(pid: int) -> str:
    """Return when a process was started, as the boot and the ticks since then; empty if there is no such process.

    Ticks do not move when the clock is set. Where there is no /proc, any live process counts as the same.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return "" if fields[0] == "Z" else f"{boot}:{fields[19]}"
    except (OSError, IndexError):
        if Path("/proc/self/stat").exists():
            return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except (PermissionError, OverflowError):
        pass
    return "alive"
