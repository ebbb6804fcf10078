"""Compare predictions with published measurements: error and bias by source, and the quality of the ranking."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from toolkit.cost.calibration import CALIBRATION, Calibration
from toolkit.cost.estimate import COVERAGE, DEVICE_SHARE, step_interval
from toolkit.cost.execution import Execution
from toolkit.cost.published import cluster_size, execution_of, measured_seconds
from toolkit.cost.published_memory import figure_kind, least_memory, predicted_memory
from toolkit.cost.published_rows import MISSING, NotScorable, PublishedRow, read_rows
from toolkit.cost.timing import seconds
from toolkit.units import GIB

SAME_JOB = (
    "source_id", "model", "n_layers", "hidden", "seq_len", "gpu", "gpu_mem_gb", "n_gpus", "global_batch", "precision",
    "framework",
)  # fmt: skip
"""Columns in which two rows must agree to be plans for the same job."""


@dataclass(frozen=True)
class Case:
    """A row that can be scored."""

    row: PublishedRow
    execution: Execution
    seconds: float | None
    """Measured seconds per step."""
    memory_gib: float | None
    """Measured memory of the fullest device."""

    @property
    def source(self) -> str:
        """Source of the row."""
        return self.row.text("source_id")


@dataclass(frozen=True)
class Score:
    """A case with the predictions of the cost model."""

    case: Case
    predicted_seconds: float
    predicted_gib: float
    """Memory, as the row's figure is meant: allocated, reserved, or that of the driver."""
    needed_gib: float = 0.0
    """Memory that the device needs at least."""

    @property
    def time_error(self) -> float | None:
        """Relative error of the step time; positive: predicted too slow."""
        measured = self.case.seconds
        return None if measured is None else self.predicted_seconds / measured - 1

    @property
    def memory_error(self) -> float | None:
        """Relative error of the memory; positive: predicted too much."""
        measured = self.case.memory_gib
        return None if measured is None else self.predicted_gib / measured - 1


def validate(csv_path: str | Path, cal: Calibration = CALIBRATION) -> dict[str, Any]:
    """The output of `toolkit validate --json`; every error is a fraction."""
    rows = read_rows(Path(csv_path))
    cases, unscored = read_cases(rows)
    scores = [score(case, cal) for case in cases]
    by_source = defaultdict(list)
    for one in scores:
        by_source[one.case.source].append(one)
    sources = {name: _source(group) for name, group in sorted(by_source.items())}
    return {
        "rows": len(rows),
        "scored": len(scores),
        "step_time": _over_sources(scores, sources),
        "memory": {"scored": len(_memory(scores)), **_errors(_memory(scores))},
        "by_source": sources,
        "by_split": _by_split(sources),
        "facts": _by_facts(scores),
        "memory_check": _memory_check(rows, scores),
        "interval": _coverage(scores),
        "ranking": ranking(scores),
        "unscored": dict(unscored),
    }


def read_cases(rows: Iterable[PublishedRow]) -> tuple[list[Case], Counter[str]]:
    """Rows that can be scored, and the number of others by reason."""
    cases: list[Case] = []
    unscored: Counter[str] = Counter()
    for row in rows:
        try:
            cases.append(_case(row))
        except NotScorable as reason:
            unscored[str(reason)] += 1
    return cases, unscored


NEEDED = ("seq_len", "micro_batch", "act_ckpt", "flash_attn", "zero_stage", "global_batch")
"""Columns that decide the step time; a row that lacks one, or infers one, is scored with the likeliest setting."""


def is_inferred(row: PublishedRow) -> bool:
    """Whether the source leaves out something that the prediction depends on."""
    silent = any(row.text(column).lower() in MISSING or "unknown" in row.text(column).lower() for column in NEEDED)
    stated = row.text("inferred_fields").lower()
    return silent or any(column in stated for column in (*NEEDED, "batch", "vpp", "ffn", "gpu kind"))


def _by_facts(scores: Sequence[Score]) -> dict[str, Any]:
    """Errors of rows whose source states everything, and of rows with inferred settings."""
    parts = {"stated": [], "inferred": []}  # type: dict[str, list[Score]]
    for one in scores:
        parts["inferred" if is_inferred(one.case.row) else "stated"].append(one)
    return {name: {"rows": len(rows), **_errors(_times(rows))} for name, rows in parts.items()}


def _memory_check(rows: Sequence[PublishedRow], scores: Sequence[Score]) -> dict[str, Any]:
    """Rows that ran but would be refused, and rows that ran out of memory but would be accepted."""
    ran = [one for one in scores if one.case.row.text("fits") != "0"]
    refused = [one for one in ran if one.needed_gib > _usable_gib(one.case.execution)]
    failed = [row for row in rows if row.text("fits") == "0" and row.text("split").lower() != "reference"]
    accepted = 0
    for row in failed:
        try:
            run = execution_of(row)
        except NotScorable:
            continue
        accepted += predicted_memory(row, run, CALIBRATION)["needed"] / GIB <= _usable_gib(run)
    share = len(refused) / len(ran) if ran else None
    return {
        "ran": len(ran),
        "refused": len(refused),
        "refused_share": share,
        "failed": len(failed),
        "accepted": accepted,
    }


def _usable_gib(e: Execution) -> float:
    """Memory of the device that a plan may use; no margin: the row is known to have run."""
    return e.cluster.device.memory_bytes * DEVICE_SHARE / GIB


def _coverage(scores: Sequence[Score]) -> dict[str, Any]:
    """Share of rows whose measured step time is inside the interval of its prediction."""
    timed = [one for one in scores if one.case.seconds]
    inside = []
    for one in timed:
        low, high = step_interval(one.case.execution).of(one.predicted_seconds)
        inside.append(low <= (one.case.seconds or 0.0) <= high)
    return {"coverage": COVERAGE, "rows": len(timed), "inside": mean(inside) if inside else None}


def _case(row: PublishedRow) -> Case:
    if row.text("split").lower() == "reference":
        raise NotScorable("reference row: under-specified, not for scores")
    measured, memory = measured_seconds(row), row.number_of("mem_gib")
    if measured is None and not memory:
        raise NotScorable("neither step time nor memory measured")
    execution = execution_of(row)
    if execution.tp * execution.pp > max(1, cluster_size(row)):
        raise NotScorable("tp·pp is larger than n_gpus")
    return Case(row, execution, measured, memory or None)


def score(case: Case, cal: Calibration = CALIBRATION) -> Score:
    """Predict a case; memory as the row's figure is meant."""
    memory = predicted_memory(case.row, case.execution, cal)
    shown = memory[figure_kind(case.row)] / GIB
    return Score(case, seconds(case.execution, cal).total, shown, least_memory(case.row, case.execution, cal) / GIB)


def ranking(scores: Sequence[Score]) -> dict[str, Any]:
    """For plans of the same job: rank correlation, and measured time of the predicted best plan over the true best."""
    jobs: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for one in scores:
        if one.case.seconds is not None:
            key = tuple(one.case.row.text(column) for column in SAME_JOB)
            jobs[key].append((one.predicted_seconds, one.case.seconds))
    groups = [pairs for pairs in jobs.values() if len({round(p, 9) for p, _ in pairs}) > 1]
    correlations = [spearman(pairs) for pairs in groups if len(pairs) > 2]
    return {
        "groups": len(groups),
        "spearman": mean(correlations) if correlations else None,
        "regret": mean(regret(pairs) for pairs in groups) if groups else None,
    }


def regret(pairs: Sequence[tuple[float, float]]) -> float:
    """Measured time of the plan with the best prediction over the best measured time; ties count with their mean."""
    best = min(predicted for predicted, _ in pairs)
    chosen = mean(measured for predicted, measured in pairs if predicted <= best * 1.0001)
    return chosen / min(measured for _, measured in pairs)


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman rank correlation of predicted and measured times; ties share their mean rank."""
    left, right = _ranks([p for p, _ in pairs]), _ranks([m for _, m in pairs])
    a, b = mean(left), mean(right)
    covariance = sum((x - a) * (y - b) for x, y in zip(left, right, strict=True))
    spread = (sum((x - a) ** 2 for x in left) * sum((y - b) ** 2 for y in right)) ** 0.5
    return covariance / spread if spread else 1.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [mean([sum(v < value for v in values), sum(v <= value for v in values) - 1]) for value in values]


def _memory(scores: Sequence[Score]) -> list[float]:
    return [one.memory_error for one in scores if one.memory_error is not None]


def _times(scores: Sequence[Score]) -> list[float]:
    return [one.time_error for one in scores if one.time_error is not None]


def _errors(errors: Sequence[float]) -> dict[str, float | None]:
    if not errors:
        return {"mape": None, "median_ape": None, "bias": None}
    sizes = [abs(error) for error in errors]
    return {"mape": mean(sizes), "median_ape": median(sizes), "bias": mean(errors)}


def _source(scores: Sequence[Score]) -> dict[str, Any]:
    """Errors of one source; those of the step time are repeated at the top level."""
    times = _times(scores)
    step_time = {"scored": len(times), **_errors(times)}
    memory = {"scored": len(_memory(scores)), **_errors(_memory(scores))}
    split = Counter(one.case.row.text("split") for one in scores).most_common(1)[0][0]
    return {"split": split, "rows": len(scores), **step_time, "step_time": step_time, "memory": memory}


def _over_sources(scores: Sequence[Score], sources: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """Mean errors with equal weight per source; `mape_rows` is the mean over rows."""
    timed = [source["step_time"] for source in sources.values() if source["step_time"]["scored"]]
    if not timed:
        return {**_errors([]), "mape_rows": None}
    overall = {name: mean(source[name] for source in timed) for name in ("mape", "median_ape", "bias")}
    return {**overall, "mape_rows": _errors(_times(scores))["mape"]}


def _by_split(sources: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mean error over the sources of each split."""
    splits: dict[str, list[float]] = defaultdict(list)
    for source in sources.values():
        if source["step_time"]["scored"]:
            splits[source["split"]].append(source["step_time"]["mape"])
    return {name: {"sources": len(errors), "mape": mean(errors)} for name, errors in sorted(splits.items())}
