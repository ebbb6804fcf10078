"""Rehearses the shipped recipes at full size and keeps a row of each; rows of the same code are not repeated."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.recipe.file import load_recipe
from toolkit.sessions.rehearse import Rehearsal, rehearse
from toolkit.sessions.resolve import Resolved, resolve
from toolkit.units import GIB

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "data" / "recipes.jsonl"
"""One JSON object per line; of several for a recipe, the last counts."""
CODE = (
    "build_engine.py", "checkpoint", "distributed", "engine", "islands", "layers", "mixtures", "models", "objectives",
    "optimizers", "pipeline", "rehearsal", "sharding",
)  # fmt: skip
"""Parts of `toolkit/runtime` that a rehearsed rank runs."""
PLAIN_KERNELS = ("model.attention=auto", "model.kernels=auto")
"""Instead of kernels that have no stand-in on fake tensors. Liger keeps fewer activations: the bytes are a bound."""
LIMIT_SECONDS, LIMIT_BYTES = 30.0, 2 * GIB
"""Processor time and resident memory that a rank should take at most."""


def overrides_of(path: Path) -> list[str]:
    """What a recipe is rehearsed with instead of its own settings."""
    section = load_recipe(path).model
    named = section.attention == "flash_attention_3" or section.kernels == "liger"
    return [*(["cluster=laptop-cpu"] if path.stem == "demo" else []), *(PLAIN_KERNELS if named else ())]


def recipes(words: list[str], *, kept: bool = False) -> int:
    """Rehearse every shipped recipe that has no row yet, print all rows; 1 unless all fit. `kept`: only print."""
    chosen = [path for path in sorted((ROOT / "recipes").glob("*.yaml")) if all(word in path.stem for word in words)]
    rows, known, code = [], _known(), code_digest()
    for path in chosen:
        resolved = resolve(load_recipe(path, overrides_of(path)))
        row = known.get(path.stem)
        is_new = row is not None and row["code"] == code and row["resolved"] == _digest_of(resolved)
        if not is_new and not kept:
            try:
                row = _rehearsed(path, resolved, code)
            except ToolkitError as error:
                print(f"{path.stem:47} {str(error).splitlines()[0]}", flush=True)
                continue
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if row is None:
            print(f"{path.stem:47} not rehearsed", flush=True)
            continue
        rows.append(row)
        print(_line(row) + ("" if is_new or not kept else "; with older code or another plan"), flush=True)
    return _summary(rows, len(chosen))


def code_digest() -> str:
    """Changes with the code that a rehearsed rank runs."""
    made = hashlib.blake2b(digest_size=8)
    for name in CODE:
        place = ROOT / "toolkit" / "runtime" / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            made.update(file.read_bytes())
    return made.hexdigest()


def _digest_of(resolved: Resolved) -> str:
    """Changes with the recipe, its plan and the cluster that it names."""
    parts = (asdict(resolved.recipe), asdict(resolved.chosen.plan), asdict(resolved.job.cluster), resolved.deepspeed)
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _known() -> dict[str, dict[str, Any]]:
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return {row["recipe"]: row for row in map(json.loads, lines)}


def _rehearsed(path: Path, resolved: Resolved, code: str) -> dict[str, Any]:
    began = time.perf_counter()
    result = rehearse(resolved)
    fullest = max(result.roles, key=result.needed_bytes)
    return {
        "recipe": path.stem,
        "code": code,
        "resolved": _digest_of(resolved),
        "plan": result.option.plan.describe(),
        "devices": result.option.plan.devices,
        "kernels": "torch's own" if set(PLAIN_KERNELS) <= set(overrides_of(path)) else "",
        "fits": result.fits,
        "mismatches": len(result.mismatches),
        "live_bytes": fullest.device_peak_bytes,
        "needed_bytes": result.needed_bytes(fullest),
        "predicted_bytes": result.predicted_bytes,
        "limit_bytes": result.option.estimate.memory_limit_bytes,
        "seconds": round(time.perf_counter() - began, 1),
        **_cost(result),
    }


def _cost(result: Rehearsal) -> dict[str, Any]:
    return {
        "ranks": len(result.roles),
        "cpu_seconds": round(sum(role.cpu_seconds for role in result.roles), 1),
        "slowest_cpu_seconds": round(max(role.cpu_seconds for role in result.roles), 1),
        "resident_bytes": max(role.resident_bytes for role in result.roles),
    }


def _line(row: dict[str, Any]) -> str:
    verdict = "fits" if row["fits"] else "DOES NOT FIT"
    matches = f"{row['mismatches']} MISMATCHES" if row["mismatches"] else "collectives match"
    kernels = " (with torch's own kernels)" if row["kernels"] else ""
    live, predicted, needed, limit = (row[f"{key}_bytes"] / GIB for key in ("live", "predicted", "needed", "limit"))
    return (
        f"{row['recipe']:47} {verdict}: {live:.2f} GiB live ({predicted:.2f} predicted), needs {needed:.1f} of "
        f"{limit:.1f}; {matches}{kernels}; {row['ranks']} ranks of {row['devices']}, at most "
        f"{row['slowest_cpu_seconds']:.0f} s of CPU each, {row['resident_bytes'] / GIB:.2f} GiB resident, "
        f"{row['seconds']:.0f} s"
    )


def _summary(rows: list[dict[str, Any]], total: int) -> int:
    good = [row for row in rows if row["fits"] and not row["mismatches"]]
    slow = [row["recipe"] for row in rows if row["slowest_cpu_seconds"] > LIMIT_SECONDS]
    large = [row["recipe"] for row in rows if row["resident_bytes"] > LIMIT_BYTES]
    print(
        f"{len(good)} of {total} fit, with collectives that match; {sum(row['seconds'] for row in rows):.0f} s in all"
    )
    for what, found in ((f"{LIMIT_SECONDS:.0f} s of CPU", slow), (f"{LIMIT_BYTES // GIB} GiB", large)):
        print(f"with ranks above {what}: {', '.join(found) or 'none'}")
    return 0 if len(good) == total else 1
