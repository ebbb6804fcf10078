"""A torch profiler trace of a few steps on chosen ranks, merged into one file for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch.profiler import ProfilerActivity, profile

from toolkit.recipe.metrics_sections import Trace
from toolkit.run_dir.step_parts import COMMUNICATION

TOP = 10
RANK_IDS = 10_000_000
"""Process and flow ids of one rank are below this number."""


class Tracer:
    """Profiles the steps of the recipe's `metrics.trace`, if this rank is listed there."""

    def __init__(self, section: Trace | None, directory: Path, rank: int) -> None:
        self._section = section if section is not None and rank in section.ranks else None
        self._directory, self._rank = directory, rank
        self._profile: Any = None

    def before(self, step: int) -> None:
        """Called before a step, counted from 1."""
        if self._section is not None and step == self._section.steps[0]:
            activities = [ProfilerActivity.CPU]
            if get_accelerator().device_name() == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def after(self, step: int) -> None:
        """Called after a step, counted from 1."""
        if self._profile is None or self._section is None or step < self._section.steps[1]:
            return
        done, self._profile = self._profile, None
        done.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        done.export_chrome_trace(str(self._directory / f"rank-{self._rank}.json"))
        top = [{"name": e.key, "calls": e.count, "seconds": _own_seconds(e)} for e in done.key_averages()]
        top.sort(key=lambda one: -one["seconds"])
        (self._directory / f"rank-{self._rank}.top.json").write_text(json.dumps(top[:TOP]), encoding="utf-8")


def _own_seconds(event: Any) -> float:
    """Time of an operation without those that it calls; on the device if there is one."""
    return float(getattr(event, "self_device_time_total", 0) or event.self_cpu_time_total) / 1e6


def merge(directory: Path) -> Path | None:
    """Merge the traces of all ranks into one file with one time axis; None if there are none."""
    files = sorted(directory.glob("rank-*.json"), key=_rank_of)
    files = [path for path in files if not path.name.endswith(".top.json")]
    if not files:
        return None
    events: list[dict[str, Any]] = []
    base = None
    for path in files:
        trace = json.loads(path.read_text(encoding="utf-8"))
        start = int(trace.get("baseTimeNanoseconds", 0))
        base = start if base is None else base
        events += _of_rank(trace["traceEvents"], _rank_of(path), (start - base) / 1000)
    merged = directory / "trace.json"
    merged.write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}), encoding="utf-8")
    return merged


def _of_rank(events: list[dict[str, Any]], rank: int, shift_us: float) -> list[dict[str, Any]]:
    """Events with ids that are unique to the rank, under the rank's name."""
    moved = []
    processes = set()
    for event in events:
        if not isinstance(event.get("pid"), int):  # the profiler's own span over everything
            continue
        own = dict(event)
        own["pid"] = rank * RANK_IDS + own["pid"] % RANK_IDS
        processes.add(own["pid"])
        if isinstance(own.get("id"), int):
            own["id"] += rank * 2**40
        if "ts" in own:
            own["ts"] = float(own["ts"]) + shift_us
        if not (own.get("ph") == "M" and own.get("name") in ("process_name", "process_sort_index")):
            moved.append(own)
    for pid in sorted(processes):
        moved.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {rank}"}})
        moved.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": rank}})
    return moved


def _rank_of(path: Path) -> int:
    return int(path.name.split(".")[0].removeprefix("rank-"))


def report(directory: Path, metrics: Path, section: Trace) -> list[str]:
    """Merge traces; return lines with the file, the longest operations and the exposed communication."""
    merged = merge(directory)
    if merged is None:
        return [f"no trace: the run did not reach step {section.steps[1]}"]
    lines = [f"trace of steps {section.steps[0]} to {section.steps[1]}: {merged} (open it in ui.perfetto.dev)"]
    rank = min(section.ranks)
    top = directory / f"rank-{rank}.top.json"
    for one in json.loads(top.read_text(encoding="utf-8")) if top.exists() else []:
        lines.append(f"  {one['seconds'] * 1000:9.2f} ms  {one['calls']:6d} ×  {one['name']}  (rank {rank})")
    held, wall = _exposed(metrics, section)
    if wall > 0:
        share = f"{held * 1000:.2f} of {wall * 1000:.2f} ms ({held / wall:.0%})"
        lines.append(f"  exposed communication: {share} on rank 0")
    return lines


def _exposed(metrics: Path, section: Trace) -> tuple[float, float]:
    """(seconds of exposed communication in the traced steps, seconds of these steps)."""
    held = wall = 0.0
    with metrics.open(encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            if record["step"] > section.steps[1]:
                break
            if record["step"] >= section.steps[0] and record["parts"]:
                wall += record["wall_seconds"]
                held += sum(record["parts"].get(name, 0.0) for name in COMMUNICATION)
    return held, wall
