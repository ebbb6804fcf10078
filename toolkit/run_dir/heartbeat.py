"""Heartbeats: one small file per rank with its progress, rewritten twice per second."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

BEAT_SECONDS = 0.5
_LOST = re.compile(
    r"closed by peer|connection reset|broken pipe|connection refused|socket|gloo|nccl|store", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The state of one rank."""

    rank: int
    host: str
    pid: int
    time: float
    """Time of writing, by the clock of the host."""
    step: int = 0
    """Completed steps."""
    phase: str = "starting"
    """`starting`, `first step`, `training`, `saving` or `ended`."""
    progress: int = 0
    """Increases with every bit of progress; constant while the rank hangs."""
    exit_code: int | None = None
    """Exit code, once the rank has ended by itself."""
    error: str = ""
    """Type and message of the error that ended the rank; empty if none."""

    @property
    def lost_others(self) -> bool:
        """Whether the rank failed because another one had gone: a consequence, not the cause."""
        return bool(self.error) and bool(_LOST.search(self.error))


def path_of(directory: Path, rank: int) -> Path:
    """Path of a rank's heartbeat file."""
    return directory / f"rank-{rank}.json"


def write(directory: Path, beat: Beat) -> None:
    """Replace a rank's heartbeat file atomically."""
    path = path_of(directory, beat.rank)
    temporary = path.with_suffix(f".{beat.pid}.tmp")
    temporary.write_text(json.dumps(asdict(beat)), encoding="utf-8")
    os.replace(temporary, path)


def read_all(directory: Path) -> dict[int, Beat]:
    """The last heartbeat of every rank."""
    known = {f.name for f in fields(Beat)}
    beats = {}
    for path in sorted(directory.glob("rank-*.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            beat = Beat(**{key: value for key, value in values.items() if key in known})
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # being replaced, or not ours
            continue
        if _is_valid(beat):
            beats[beat.rank] = beat
    return beats


def _is_valid(beat: Beat) -> bool:
    """Whether every field has its type: whoever can write to the run directory can write any JSON there."""
    numbers = (beat.rank, beat.pid, beat.step, beat.progress, 0 if beat.exit_code is None else beat.exit_code)
    texts = (beat.host, beat.phase, beat.error)
    clock = isinstance(beat.time, int | float) and not isinstance(beat.time, bool) and abs(beat.time) < float("inf")
    return clock and all(type(n) is int for n in numbers) and all(isinstance(text, str) for text in texts)


def moved(before: dict[int, Beat], after: dict[int, Beat]) -> bool:
    """Whether any rank made progress between two readings."""
    return any(rank not in before or beat.progress != before[rank].progress for rank, beat in after.items())


def ended(beat: Beat, code: int, error: str, now: float) -> Beat:
    """The final heartbeat of a rank."""
    return replace(beat, phase="ended", exit_code=code, error=error, time=now, progress=beat.progress + 1)


def has_stepped(beats: dict[int, Beat]) -> bool:
    """Whether any rank has completed a step since it was started: before that there is nothing to save."""
    return any(beat.step or beat.phase in ("training", "saving") for beat in beats.values())
