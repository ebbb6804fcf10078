"""Figures of a report as plain data, shared by the terminal and the HTML page."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from toolkit.errors import BadInput
from toolkit.recipe.yaml_file import parse_yaml
from toolkit.reports.reader import RecordedRun, settled
from toolkit.reports.untrusted import harmless, text
from toolkit.run_dir.predicted_vs_measured import ComparisonRow, compare
from toolkit.run_dir.step_parts import MEMORY
from toolkit.secrets import redact
from toolkit.units import GIB, MIB

SHOWN_POINTS = 1000
"""Points of a curve of one island."""


def facts(run: RecordedRun) -> dict[str, str]:
    """Return the run's key figures: label → text."""
    loss, rest = run.scalars["loss"], settled(len(run.steps))
    known = loss[~np.isnan(loss)]
    lowest = f"{known.min():.4f} at step {int(run.steps[int(np.nanargmin(loss))])}" if len(known) else "–"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # no value in any step: NaN
        memory = float(max(memory_by_rank(run) or [np.nanmax(run.scalars["memory_bytes"])]))
    found = {
        "status": str(run.summary.get("status", "running, or ended without a summary")),
        "steps": f"{int(run.steps[-1]):,}",
        "loss": f"{loss[0]:.4f} → {loss[-1]:.4f}, lowest {lowest}",
        "tokens": f"{int(np.nansum(run.scalars['tokens'])):,}",
        "time": duration(float(np.nansum(_wall(run)))),
        "step time": f"{milliseconds(_median(run, 'step_seconds', rest))} (median)",
        "tokens/s": f"{_median(run, 'tokens_per_second', rest):,.0f} (median)",
        "MFU / HFU": f"{_median(run, 'mfu', rest):.1%} / {_median(run, 'hfu', rest):.1%}",
        "memory": size(memory),
        "skipped steps": f"{int(np.nansum(run.scalars['skipped'])):,}",
    }
    return {key: value.replace("nan%", "–") for key, value in found.items()}


def plan_words(run: RecordedRun) -> str:
    """Return the plan in one line."""
    plan = run.plan
    axes = [f"{axis} {plan[axis]}" for axis in ("dp", "tp", "pp", "cp", "sp", "ep") if plan.get(axis, 1) > 1]
    stage = [f"ZeRO {plan['zero_stage']}"] if plan.get("zero_stage") else []
    micro = [f"micro {plan['micro_batch']} × {plan['grad_accum']}"] if "micro_batch" in plan else []
    return " · ".join([str(plan.get("strategy", "no plan.json")), *axes, *stage, *micro])


def rows(run: RecordedRun) -> list[ComparisonRow]:
    """Return predicted and measured seconds per step, by part."""
    return compare(run.plan.get("time", {}), run.mean_parts())


def step_ratio(run: RecordedRun) -> tuple[float | None, float]:
    """Return predicted and measured seconds per step."""
    predicted = run.plan.get("time", {}).get("total")
    return predicted, _median(run, "step_seconds", settled(len(run.steps)))


def memory_rows(run: RecordedRun) -> list[ComparisonRow]:
    """Return predicted and measured bytes by part, on the rank with the highest peak."""
    found = run.summary.get("memory_parts") or {}
    return [
        ComparisonRow(n, MEMORY[n][0], part["predicted"], part["measured"]) for n, part in found.items() if n in MEMORY
    ]


def memory_by_rank(run: RecordedRun) -> list[int]:
    """Return the peak memory of each rank in bytes; empty until the run has ended."""
    return [int(size) for size in run.summary.get("memory_bytes_by_rank", [])]


def islands(run: RecordedRun) -> list[dict[str, Any]]:
    """Return one row per island: its steps over time, its rounds, staleness and traffic, and what it did not apply.

    Synchronous islands are one row, because the first rank writes for all of them.
    """
    found: dict[int, list[dict[str, float]]] = {}
    for exchange in run.exchanges:
        found.setdefault(int(exchange.get("island", 0)), []).append(exchange)
    start = min((one["time"] for one in run.exchanges if not math.isnan(one["time"])), default=0.0)
    return [_island(island, records, start) for island, records in sorted(found.items())]


def _island(island: int, records: list[dict[str, float]], start: float) -> dict[str, Any]:
    records = sorted(records, key=lambda one: one["time"])
    shown, last = records[:: max(1, len(records) // SHOWN_POINTS)], records[-1]
    columns: dict[str, list[float | None]] = {
        name: [one.get(name) for one in shown]
        for name in ("step", "staleness", "sent_bytes", "local_steps", "bits", "islands")
        if name in last
    }
    ignored = {name: int(count) for name, count in last.items() if name.startswith(("dropped_", "rejected_")) and count}
    return {
        "island": island,
        "steps": len(records),
        "minutes": [None if math.isnan(one["time"]) else (one["time"] - start) / 60 for one in shown],
        "gap_minutes": _longest_pause(records),
        **columns,
        "rounds": last.get("rounds", last.get("exchanges")),
        "sent": last.get("sent_bytes", 0),
        "busy_seconds": last.get("busy_seconds", 0),
        "waited_seconds": last.get("waited_seconds", 0),
        "ignored": text(", ".join(f"{name.replace('_', ' ')}: {count:,}" for name, count in sorted(ignored.items()))),
    }


def _longest_pause(records: Sequence[Mapping[str, float]]) -> float:
    """Return the longest time between two steps of an island, in minutes: it was away, or it waited."""
    times = [one["time"] for one in records if not math.isnan(one["time"])]
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0) / 60


def collectives(run: RecordedRun) -> list[dict[str, Any]]:
    """Return one row per collective and purpose: calls, bytes and seconds of one step on rank 0."""
    return [{"name": name, **values} for name, values in run.last_detail.get("collectives", {}).items()]


def differing_keys(runs: Sequence[RecordedRun]) -> list[tuple[str, list[str]]]:
    """Return the recipe keys whose values differ between runs, with the values."""
    flat = [flatten(recipe(run)) for run in runs]
    keys = sorted({key for one in flat for key in one})
    return [(key, [str(one.get(key, "–")) for one in flat]) for key in keys if len({str(f.get(key)) for f in flat}) > 1]


def recipe(run: RecordedRun) -> dict[str, Any]:
    """Return the run's recipe without secrets."""
    try:
        found = redact(harmless(parse_yaml(run.recipe, "recipe.yaml")))
    except BadInput as error:
        return {"recipe.yaml": f"can't be read: {error}"}
    return found if isinstance(found, dict) else {}


def flatten(tree: Any, path: str = "") -> dict[str, Any]:
    """Return key path → value for nested mappings."""
    if not isinstance(tree, Mapping) or not tree:
        return {path: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flatten(value, f"{path}.{key}" if path else str(key))
    return found


def _wall(run: RecordedRun) -> np.ndarray:
    wall = run.scalars["wall_seconds"]
    return np.where(np.isnan(wall), run.scalars["step_seconds"], wall)


def _median(run: RecordedRun, name: str, rest: slice) -> float:
    values = run.scalars[name][rest]
    return float("nan") if np.isnan(values).all() else float(np.nanmedian(values))


def size(value: float) -> str:
    """Format bytes as GiB or MiB."""
    return f"{value / GIB:.2f} GiB" if value >= GIB else f"{value / MIB:.1f} MiB"


def milliseconds(value: float) -> str:
    """Format the seconds of a step as ms, or as s from 10 s."""
    if math.isnan(value):
        return "–"
    return f"{value:.2f} s" if value >= 10 else f"{value * 1000:.1f} ms"


def duration(seconds: float) -> str:
    """Format the seconds of a run as hours, minutes and seconds."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{seconds:.1f} s"
