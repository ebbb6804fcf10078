"""Read a run directory into columns of numbers; a million steps take seconds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.json

from toolkit.errors import BadInput
from toolkit.reports.downsample import extremes
from toolkit.run_dir.layout import RunDir, read_json
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
BLOCK_BYTES = 1 << 20
TAIL_BYTES = 1 << 20


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
    parts: dict[str, Column]
    """Seconds per step of each part that was ever above zero."""
    ranks: dict[str, dict[str, Column]]
    """Minimum, mean and maximum over ranks, at the steps in `rank_steps`."""
    rank_steps: Column
    stragglers: dict[int, tuple[int, float]]
    """Rank → how often it was reported as a straggler, and its mean delay in seconds per step."""
    last_detail: dict[str, Any] = field(default_factory=dict)
    """Newest record with details: collectives, pipeline bubble by stage."""

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return self.path.resolve().name

    def mean_parts(self) -> dict[str, float]:
        """Return the mean seconds per step by part, without the first steps, which fill caches."""
        return {name: float(np.nanmean(values[settled(len(values))])) for name, values in self.parts.items()}


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
    table = _table(run.metrics)
    if table.num_rows == 0:
        raise BadInput(str(path), "has no completed step yet: there is nothing to report")
    scalars = {name: _floats(table[name]) for name in SCALARS}
    parts = {name: _floats(pa.compute.struct_field(table["parts"], name)) for name in PARTS}
    detailed = _detailed(run.metrics, table)
    return RecordedRun(
        path=path,
        recipe=run.recipe.read_text(encoding="utf-8") if run.recipe.is_file() else "",
        plan=read_json(run.plan),
        summary=read_json(run.summary),
        events=list(_lines(run.events.read_bytes())) if run.events.is_file() else [],
        steps=table["step"].to_numpy(),
        scalars=scalars,
        parts={name: values for name, values in parts.items() if np.nansum(values) > 0},
        ranks=_ranks(detailed),
        rank_steps=np.array([line["step"] for line in detailed], dtype=int),
        stragglers=_stragglers(table),
        last_detail=_last_detail(run.metrics),
    )


def _schema() -> pa.Schema:
    """Return the columns read from every line. Of `ranks`, which is slow to parse, only one value is read."""
    number = pa.float64()
    return pa.schema(
        [
            ("step", pa.int64()),
            *((name, number) for name in SCALARS),
            ("parts", pa.struct([(name, number) for name in PARTS])),
            ("ranks", pa.struct([(MARK, pa.struct([("max", number)]))])),
            ("straggler", pa.struct([("rank", pa.int64()), ("seconds", number)])),
        ]
    )


def _table(metrics: Path) -> pa.Table:
    """Read the complete lines of metrics.jsonl; the last one may still be being written."""
    schema = _schema()
    if metrics.stat().st_size == 0:
        return schema.empty_table()
    with pa.memory_map(str(metrics)) as source:
        content = source.read_buffer()
        end = _end_of_last_line(content)
        try:
            return pa.json.read_json(
                pa.BufferReader(content.slice(0, end)),
                pa.json.ReadOptions(block_size=BLOCK_BYTES),
                pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
            )
        except pa.ArrowInvalid:  # a crash truncated a line in the middle: parse line by line and skip it
            return pa.Table.from_pylist([_known(line) for line in _lines(content.to_pybytes())], schema)


def _end_of_last_line(content: pa.Buffer) -> int:
    tail = content.slice(max(0, content.size - TAIL_BYTES))
    return int(content.size - tail.size + tail.to_pybytes().rfind(b"\n") + 1)


def _known(line: dict[str, Any]) -> dict[str, Any]:
    """Convert the scalars of a line to floats, as the schema requires."""
    floats = {name: None if line.get(name) is None else float(line[name]) for name in SCALARS}
    return {**line, **floats}


def _lines(text: bytes) -> Iterable[dict[str, Any]]:
    """Yield the JSON objects, one per line; truncated lines are skipped."""
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def _floats(column: pa.ChunkedArray) -> Column:
    values: Column = column.cast(pa.float64()).fill_null(float("nan")).to_numpy()
    return values


def _detailed(metrics: Path, table: pa.Table) -> list[dict[str, Any]]:
    """Return the records with values by rank; if there are very many, a sample that includes the slowest."""
    rows = np.flatnonzero(pa.compute.is_valid(table["ranks"]).to_numpy())
    if len(rows) > MOST_DETAILED:
        worst = _floats(pa.compute.struct_field(table["ranks"], [MARK, "max"]))[rows]
        rows = rows[extremes(worst, MOST_DETAILED)]
    return [json.loads(line) for line in _lines_at(metrics, rows, table.num_rows)]


def _lines_at(metrics: Path, rows: np.ndarray, count: int) -> Iterable[bytes]:
    """Yield some lines of a file without iterating over all of them in Python."""
    if len(rows) == 0:
        return
    raw = np.memmap(metrics, dtype=np.uint8, mode="r")
    ends = np.flatnonzero(raw == ord("\n"))
    if len(ends) != count:  # some lines are truncated, so row numbers are not line numbers
        complete = [json.dumps(line).encode() for line in _lines(raw.tobytes())]
        yield from (complete[row] for row in rows)
        return
    for row in rows:
        yield raw[(ends[row - 1] + 1 if row else 0) : ends[row]].tobytes()


def _ranks(detailed: list[dict[str, Any]]) -> dict[str, dict[str, Column]]:
    found = {}
    for name in RANK_VALUES:
        all_stats = [line["ranks"].get(name, {}) for line in detailed]
        if any(all_stats):
            found[name] = {stat: np.array([one.get(stat, np.nan) for one in all_stats], dtype=float) for stat in STATS}
    return found


def _stragglers(table: pa.Table) -> dict[int, tuple[int, float]]:
    reported = table.filter(pa.compute.is_valid(table["straggler"]))["straggler"].to_pylist()
    late: dict[int, list[float]] = {}
    for one in reported:
        late.setdefault(one["rank"], []).append(one["seconds"])
    return {rank: (len(all_), sum(all_) / len(all_)) for rank, all_ in sorted(late.items())}


def _last_detail(metrics: Path) -> dict[str, Any]:
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
        found = [line for line in _lines(file.read()) if line.get("collectives")]
    return found[-1] if found else {}
