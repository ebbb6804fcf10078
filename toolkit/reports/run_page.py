"""The HTML page of `toolkit report --html`: one self-contained file, with plotly embedded."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from toolkit.errors import BadInput
from toolkit.reports import figures
from toolkit.reports.curves import extremes, means
from toolkit.reports.reader import RecordedRun
from toolkit.reports.template import fill
from toolkit.run_dir.step_parts import PARTS
from toolkit.secrets import redact

CURVES = ("loss", "grad_norm", "tokens_per_second", "mfu", "hfu", "step_seconds", "lr", "loss_scale")
SHOWN_RANKS = 4096
SHOWN_EVENTS = 500


def render(runs: Sequence[RecordedRun], hidden: Iterable[str] = ()) -> str:
    """Return the page of one run, or of several overlaid; secrets and the values in `hidden` are redacted."""
    data = {
        "title": runs[0].name if len(runs) == 1 else " · ".join(run.name for run in runs),
        "part_names": PARTS,
        "runs": [_run(run) for run in runs],
        "differing": figures.differing_keys(runs) if len(runs) > 1 else [],
    }
    # The library is inserted last, so that no text in the data can be mistaken for its placeholder.
    return fill("report.html", redact(data, hidden)).replace("__PLOTLY__", plotly_script(), 1)


def plotly_script() -> str:
    """Return the plotly library to embed; raise `BadInput` if it is not installed."""
    found = importlib.util.find_spec("plotly")
    if found is None or not found.submodule_search_locations:
        raise BadInput("--html", "the page needs plotly; install it with: pip install 'zero-toolkit[report]'")
    path = Path(found.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    return path.read_text(encoding="utf-8").replace("</script", "<\\/script")


def _run(run: RecordedRun) -> dict[str, Any]:
    predicted, measured = figures.step_ratio(run)
    return {
        "name": run.name,
        "plan_words": figures.plan_words(run),
        "facts": figures.facts(run),
        "curves": _curves(run),
        "parts": {
            "x": _plain(means(run.steps.astype(float))),
            "y": {n: _plain(means(v)) for n, v in run.parts.items()},
        },
        "mean_parts": {name: _number(value) for name, value in run.mean_parts().items()},
        "rows": [{**asdict(row), "ratio": row.ratio} for row in figures.rows(run)],
        "step": {"predicted": predicted, "measured": _number(measured)},
        "explanation": run.summary.get("explanation", ""),
        "memory": {
            "by_rank": figures.memory_by_rank(run)[:SHOWN_RANKS],
            "predicted": run.plan.get("memory", {}).get("total"),
            "limit": run.plan.get("memory_limit_bytes"),
            "rows": [{**asdict(row), "ratio": row.ratio} for row in figures.memory_rows(run)],
        },
        "ranks": {name: _band(run, stats) for name, stats in run.ranks.items()},
        "stragglers": [{"rank": rank, "times": n, "seconds": s} for rank, (n, s) in run.stragglers.items()],
        "bubble_by_stage": run.last_detail.get("bubble_by_stage") or [],
        "collectives": figures.collectives(run),
        "routing": run.last_routing,
        "islands": figures.islands(run),
        "events": run.events[-SHOWN_EVENTS:],
        "recipe": yaml.safe_dump(figures.recipe(run), sort_keys=False, allow_unicode=True),
        "plan": run.plan,
    }


def _curves(run: RecordedRun) -> dict[str, dict[str, Any]]:
    """Everything that is drawn over steps; evaluations as `eval.loss`, figures as `preference.margin`."""
    shown = {name: values for name, values in run.scalars.items() if name in CURVES} | run.figures
    found = {name: _curve(run.steps, values) for name, values in shown.items() if _any(values)}
    return found | {f"eval.{name}": _curve(*columns) for name, columns in run.evaluations.items()}


def _curve(steps: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    kept = extremes(values)
    return {"x": steps[kept].tolist(), "y": _plain(values[kept])}


def _band(run: RecordedRun, stats: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return minimum, mean and maximum over ranks; downsampling keeps the extremes of the maximum."""
    kept = extremes(stats["max"], 600)
    return {"x": run.rank_steps[kept].tolist(), **{name: _plain(values[kept]) for name, values in stats.items()}}


def _any(values: np.ndarray) -> bool:
    return not bool(np.isnan(values).all())


def _plain(values: np.ndarray) -> list[float | None]:
    """Round to six digits, which halves the page; NaN and infinite values become gaps."""
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if np.isfinite(value) else None
