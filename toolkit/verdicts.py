"""Verdicts of proofs, rehearsals and trials, kept in a file so that each is reached once per host and user."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """Whether something holds, and if not, why."""

    ok: bool
    reason: str = ""


class VerdictFile:
    """A JSON file of verdicts by key. A lost or damaged file only costs time."""

    def __init__(self, path: Path, consequence: str) -> None:
        """`consequence`: what happens if the file is damaged, for the message."""
        self._path, self._consequence = path, consequence
        self._known: dict[str, dict[str, Any]] | None = None
        self._has_lock = False

    def get(self, key: str) -> Verdict | None:
        """The verdict of a key; None if there is none."""
        if self._known is None:
            self._known = self._read()
        found = self._known.get(key)
        return Verdict(bool(found["ok"]), str(found["reason"])) if found else None

    @contextlib.contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Hold the file's lock: of the ranks of a host, one finds a verdict, and the others read it.

        A verdict may be needed to find another one; the lock is then held already. Where a file can't be locked,
        every rank finds out for itself.
        """
        if self._has_lock:
            yield
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = self._path.with_suffix(".lock").open("ab")
        except OSError:  # read-only home directory
            yield
            return
        with lock:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            self._has_lock, self._known = True, None
            try:
                yield
            finally:
                self._has_lock = False

    def put(self, key: str, verdict: Verdict) -> None:
        """Store a verdict."""
        self._known = self._read() | {key: asdict(verdict)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(f".{os.getpid()}.part")  # ranks of a host may write at once
            part.write_text(json.dumps(self._known, indent=1), encoding="utf-8")
            part.replace(self._path)
        except OSError:
            return  # read-only home directory: the next run finds out again

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            known = json.loads(self._path.read_bytes())
            valid = isinstance(known, dict) and all(map(_is_verdict, known.values()))
        except OSError:
            return {}
        except (ValueError, RecursionError):
            valid = False
        if not valid:
            print(f"{self._path} is damaged and ignored; {self._consequence}", file=sys.stderr)
            return {}
        return dict(known)


def _is_verdict(found: object) -> bool:
    if not isinstance(found, dict) or type(found.get("ok")) is not bool or not isinstance(found.get("reason"), str):
        return False
    return not any("\ud800" <= character <= "\udfff" for character in found["reason"])  # half a character: no text


def installed(libraries: Iterable[str]) -> list[str]:
    """Versions of libraries; empty for one that is not installed."""
    return [_version(name) for name in libraries]


@functools.cache
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
