"""Read a run directory into columns of numbers; a million steps take seconds.

Files of a run may be damaged, or written by somebody else. Python's own parser reads them, line by line: pyarrow
(26.0.1) ended the process with SIGSEGV on some damaged lines.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.errors import BadInput
from toolkit.reports.curves import extremes
from toolkit.reports.untrusted import harmless, number, numbers, text
from toolkit.run_dir.layout import RunDir, read_json
from toolkit.run_dir.router_load import advice
from toolkit.run_dir.step_parts import PARTS

Column = np.ndarray
SCALARS = (
    "loss", "lr", "grad_norm", "tokens", "step_seconds", "wall_seconds", "tokens_per_second", "mfu", "hfu",
    "memory_bytes", "loss_scale", "skipped",
)  # fmt: skip
"""Keys of metrics.jsonl that a report shows for every step."""
RANK_VALUES = (
    "wall_seconds", "busy_seconds", "comm_seconds", "data_seconds", "memory_bytes", "memory_now_bytes", "cpu_percent",
    "host_memory_bytes", "device_percent", "device_bandwidth_percent", "power_watts", "temperature_celsius",
    "nvlink_bytes_per_second", "pcie_bytes_per_second",
)  # fmt: skip
STATS = ("min", "mean", "max", "min_rank", "max_rank")
MARK = "busy_seconds"
MOST_DETAILED = 4000
"""Largest number of records whose values by rank are read."""
MOST_EXCHANGES = 200_000
"""Largest number of records whose exchanges between islands are shown."""
FIGURES = ("preference", "objective", "router")
"""Keys of metrics.jsonl with figures of a step: of the objective, and of the routers of experts."""
MOST_FIGURES = 64
LARGEST_STEP = 2**53
LONGEST_LINE_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """Everything a report shows about one run."""

    path: Path
    recipe: str
    plan: dict[str, Any]
    summary: dict[str, Any]
    """Contents of summary.json; empty while the run is in progress."""
    events: list[dict[str, Any]]
    steps: Column
    scalars: dict[str, Column]
    """NaN where a step has no such value."""
    figures: dict[str, Column]
    """Figures of the objective and of routers, such as `preference.margin`; NaN where a step has no such value."""
    evaluations: dict[str, tuple[Column, Column]]
    """What evaluations have found, such as `loss`: steps and values."""
    parts: dict[str, Column]
    """Seconds per step of each part that was ever above zero; NaN where a step had no such part."""
    ranks: dict[str, dict[str, Column]]
    """Minimum, mean and maximum over ranks, at the steps in `rank_steps`."""
    rank_steps: Column
    stragglers: dict[int, tuple[int, float]]
    """Rank → how often it was reported as a straggler, and its mean delay in seconds per step."""
    last_detail: dict[str, Any] = field(default_factory=dict)
    """Newest record with details: collectives, pipeline bubble by stage."""
    last_routing: dict[str, Any] = field(default_factory=dict)
    """Newest record with the load of experts: `step`, `load` over the mean by layer, and a sentence of `advice`."""
    exchanges: list[dict[str, float]] = field(default_factory=list)
    """What islands say about their exchanges, in order: `step`, `time`, and the figures of the record."""
    broken: tuple[int, ...] = ()
    """Numbers of the lines of metrics.jsonl that can't be read; an unfinished last line is not counted."""

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return self.path.resolve().name

    def mean_parts(self) -> dict[str, float]:
        """Return the mean seconds per step by part, without the first steps, which fill caches.

        A part that only some steps have, such as an evaluation, counts with its share of each step.
        """
        kept = {name: values[settled(len(values))] for name, values in self.parts.items()}
        timed = sum(~np.isnan(np.stack(list(kept.values()))).all(axis=0)) if kept else 0
        return {name: float(np.nansum(values) / timed) if timed else math.nan for name, values in kept.items()}


def settled(steps: int) -> slice:
    """Return the slice without the first three steps, if there are more."""
    return slice(3, None) if steps > 3 else slice(None)


def read_run(path: Path) -> RecordedRun:
    """Read a run directory; raise `BadInput` if it is not one, or has no completed step."""
    run = RunDir(path)
    if not run.metrics.is_file():
        raise BadInput(
            str(path), "is not a run directory with steps (no metrics.jsonl); give one that `toolkit train` made"
        )
    table = _Table()
    for place, line in _lines(run.metrics):
        table.add(place, line)
    if not table.steps:
        lines = f"; {len(table.broken)} of its lines can't be read" if table.broken else ""
        raise BadInput(str(path), f"has no completed step yet: there is nothing to report{lines}")
    detailed = _detailed(run.metrics, table)
    parts = {name: np.array(values) for name, values in table.parts.items()}
    return RecordedRun(
        path=path,
        recipe=text(_read(run.recipe).decode("utf-8", "replace")),
        plan=_plan(harmless(read_json(run.plan))),
        summary=_summary(harmless(read_json(run.summary))),
        events=[harmless(line) for _, line in _lines(run.events) if line is not None] if run.events.is_file() else [],
        steps=np.array(table.steps, dtype=np.int64),
        scalars={name: np.array(values) for name, values in table.scalars.items()},
        figures={name: np.array(table.filled(values)) for name, values in table.figures.items()},
        evaluations=_evaluations(run.evaluations),
        parts={name: values for name, values in parts.items() if np.nansum(values) > 0},
        ranks=_ranks(detailed),
        rank_steps=np.array([line["step"] for line in detailed], dtype=int),
        stragglers={rank: (len(late), sum(late) / len(late)) for rank, late in sorted(table.late.items())},
        last_detail=_details(table.last_detail),
        last_routing=_routing(table.last_routing),
        exchanges=table.exchanges,
        broken=tuple(table.broken),
    )


@dataclass(frozen=True)
class _Place:
    """Where a line is in a file."""

    number: int
    start: int
    length: int


@dataclass
class _Table:
    """Columns of metrics.jsonl, and the places of the lines with values by rank."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    scalars: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in SCALARS})
    parts: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in PARTS})
    figures: dict[str, array[float]] = field(default_factory=dict)
    """Columns that end at the last step with a value."""
    late: dict[int, list[float]] = field(default_factory=dict)
    detailed: list[tuple[_Place, float]] = field(default_factory=list)
    """Lines with values by rank, and the slowest rank's seconds."""
    last_detail: dict[str, Any] = field(default_factory=dict)
    last_routing: dict[str, Any] = field(default_factory=dict)
    exchanges: list[dict[str, float]] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)

    def add(self, place: _Place, line: dict[str, Any] | None) -> None:
        step = line.get("step") if line is not None else None
        if line is None or type(step) is not int or not 0 <= step < LARGEST_STEP:
            self.broken.append(place.number)
            return
        self.steps.append(step)
        for name, column in self.scalars.items():
            column.append(number(line.get(name)))
        parts = line.get("parts")
        parts = parts if isinstance(parts, dict) else {}
        for name, column in self.parts.items():
            column.append(number(parts.get(name)))
        for group in FIGURES:
            for name, value in numbers(line.get(group)).items():
                self._add_figure(text(f"{group}.{name}"), value)
        self._add_details(place, line)

    def _add_figure(self, name: str, value: float) -> None:
        if name in self.figures or len(self.figures) < MOST_FIGURES:
            column = self.filled(self.figures.get(name, array("d")))
            column[-1] = value
            self.figures[name] = column

    def filled(self, column: array[float]) -> array[float]:
        """A column as long as there are steps, with NaN at its end."""
        column.extend([math.nan] * (len(self.steps) - len(column)))
        return column

    def _add_details(self, place: _Place, line: dict[str, Any]) -> None:
        ranks, straggler = line.get("ranks"), line.get("straggler")
        if isinstance(ranks, dict):
            self.detailed.append((place, numbers(ranks.get(MARK)).get("max", math.nan)))
        if isinstance(straggler, dict) and not math.isnan(seconds := number(straggler.get("seconds"))):
            rank = straggler.get("rank")
            if type(rank) is int and 0 <= rank < LARGEST_STEP:
                self.late.setdefault(rank, []).append(seconds)
        if line.get("collectives"):
            self.last_detail = line
        if line.get("router_load"):
            self.last_routing = line
        found = numbers(line.get("exchange"))
        if found and len(self.exchanges) < MOST_EXCHANGES:
            self.exchanges.append({**found, "step": line["step"], "time": number(line.get("time"))})


def _lines(path: Path) -> Iterator[tuple[_Place, dict[str, Any] | None]]:
    """Yield each line's place and JSON object, None if it is not one; a last line without end is left out."""
    start = 0
    with path.open("rb") as file:
        for count, line in enumerate(iter(lambda: file.readline(LONGEST_LINE_BYTES), b""), 1):
            if line.endswith(b"\n") and line.strip():
                yield _Place(count, start, len(line)), _object(line)
            elif len(line) == LONGEST_LINE_BYTES:
                yield _Place(count, start, len(line)), None
            start += len(line)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _evaluations(path: Path) -> dict[str, tuple[Column, Column]]:
    """Steps and values of everything that evaluations measure; a step that was evaluated again counts once."""
    found: dict[str, dict[int, float]] = {}
    for _, line in _lines(path) if path.is_file() else ():
        values = numbers(line)
        step = values.pop("step", math.nan)
        for name, value in values.items() if 0 <= step < LARGEST_STEP else ():
            if name in found or len(found) < MOST_FIGURES:
                found.setdefault(text(name), {})[int(step)] = value
    return {name: (np.array(list(by)), np.array(list(by.values()))) for name, by in found.items()}


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _detailed(metrics: Path, table: _Table) -> list[dict[str, Any]]:
    """Return the records with values by rank; if there are very many, a sample that includes the slowest."""
    places = [place for place, _ in table.detailed]
    if len(places) > MOST_DETAILED:
        kept = extremes(np.array([slowest for _, slowest in table.detailed]), MOST_DETAILED)
        places = [places[row] for row in kept]
    with metrics.open("rb") as file:
        return [line for place in places if (line := _object_at(file, place)) is not None]


def _object_at(file: Any, place: _Place) -> dict[str, Any] | None:
    file.seek(place.start)
    return _object(file.read(place.length))


def _ranks(detailed: list[dict[str, Any]]) -> dict[str, dict[str, Column]]:
    found = {}
    for name in RANK_VALUES:
        all_stats = [numbers(line["ranks"].get(name)) for line in detailed]
        if any(all_stats):
            found[name] = {stat: np.array([one.get(stat, np.nan) for one in all_stats], dtype=float) for stat in STATS}
    return found


def _plan(found: dict[str, Any]) -> dict[str, Any]:
    """Return a plan whose axes, times and sizes are numbers; others are left out."""
    axes = ("dp", "tp", "pp", "sp", "cp", "ep", "zero_stage", "micro_batch", "grad_accum", "memory_limit_bytes")
    wrong = [name for name in axes if name in found and math.isnan(number(found[name]))]
    kept = {name: value for name, value in found.items() if name not in wrong}
    if ("micro_batch" in kept) != ("grad_accum" in kept):
        kept = {name: value for name, value in kept.items() if name not in ("micro_batch", "grad_accum")}
    return {**kept, **{name: numbers(kept[name]) for name in ("time", "memory") if name in kept}}


def _summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return a summary whose parts have the types that a report computes with."""
    sizes, parts = found.get("memory_bytes_by_rank"), found.get("memory_parts")
    pairs = {name: numbers(pair) for name, pair in parts.items()} if isinstance(parts, dict) else {}
    by_rank = [number(size) for size in sizes] if isinstance(sizes, list) else []
    return {
        **found,
        "explanation": str(found.get("explanation") or ""),
        "memory_bytes_by_rank": [int(size) for size in by_rank if not math.isnan(size)],
        "memory_parts": {name: pair for name, pair in pairs.items() if {"predicted", "measured"} <= pair.keys()},
    }


def _details(line: dict[str, Any]) -> dict[str, Any]:
    """Return collectives and pipeline bubbles of a record, as far as they are numbers."""
    found, bubble = line.get("collectives"), line.get("bubble_by_stage")
    rows = {text(name): numbers(row) for name, row in found.items()} if isinstance(found, dict) else {}
    return {
        "collectives": {name: row for name, row in rows.items() if {"calls", "bytes", "seconds"} <= row.keys()},
        "bubble_by_stage": harmless(bubble) if isinstance(bubble, list) else [],
    }


def _routing(line: dict[str, Any]) -> dict[str, Any]:
    """Return the load of experts of a record as a table of numbers; empty if it is not one."""
    found = line.get("router_load")
    rows = (
        [[number(value) for value in row] for row in found if isinstance(row, list)] if isinstance(found, list) else []
    )
    if not rows or len({len(row) for row in rows}) > 1 or any(math.isnan(value) for row in rows for value in row):
        return {}
    return {"step": line["step"], "load": rows, "advice": advice(numbers(line.get("router")))}
