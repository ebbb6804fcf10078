"""Reads W&B's own file of a run: protobuf records in the log format of LevelDB, behind a header of seven bytes.

wandb (0.31) ships no reader in Python. What is in the file is what W&B has of a run, whatever a crash did.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES = 32 * 1024
HEADER_BYTES = 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def messages(path: Path) -> Iterator[bytes]:
    """Every whole record; what a crash has cut short ends the file."""
    raw = path.read_bytes()
    place, parts = HEADER_BYTES if raw[:4] == b":W&B" else len(raw), b""
    while place + HEADER_BYTES <= len(raw):
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < HEADER_BYTES:  # too short for a header: filled with zeros
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", raw[place : place + HEADER_BYTES])
        data = raw[place + HEADER_BYTES : place + HEADER_BYTES + length]
        place += HEADER_BYTES + length
        if kind not in (FULL, FIRST, MIDDLE, LAST) or len(data) < length:
            return
        parts = data if kind in (FULL, FIRST) else parts + data
        if kind in (FULL, LAST):
            yield parts


def records(path: Path) -> Iterator[Any]:
    """The same as W&B's messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    for message in messages(path):
        yield Record.FromString(message)


def history(path: Path) -> Iterator[dict[str, Any]]:
    """What was logged, a mapping a step; nested keys are joined by dots."""
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            yield {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}


def files(directory: Path, run_id: str) -> list[Path]:
    """Files of a run in a run directory, oldest first."""
    return sorted(directory.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb"), key=lambda path: path.stat().st_mtime_ns)


def last_step(directory: Path, run_id: str) -> int:
    """Newest step that a run's files hold; 0: none."""
    for path in reversed(files(directory, run_id)):
        steps = [int(point["_step"]) for point in history(path) if "_step" in point]
        if steps:
            return max(steps)
    return 0
