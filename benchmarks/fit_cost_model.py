"""Refits the cost model's constants and prints its errors: by source, leaving one source out, and term by term.

    python benchmarks/fit_cost_model.py [--loo] [--ablations]

Every source has equal weight; the loss is a smooth absolute error of log step time. The constants that come out belong
in `toolkit/cost/calibration.py`, the intervals in `toolkit/cost/estimate.py`; nothing is written.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from toolkit.clusters.cluster import Cluster  # noqa: E402
from toolkit.clusters.devices import find_device  # noqa: E402
from toolkit.cost import operators  # noqa: E402
from toolkit.cost.calibration import CALIBRATION, CONSTANTS, Calibration  # noqa: E402
from toolkit.cost.communication import all_reduce, group  # noqa: E402
from toolkit.cost.estimate import STEP_TIME, kind_of  # noqa: E402
from toolkit.cost.published_rows import read_rows  # noqa: E402
from toolkit.cost.timing import seconds  # noqa: E402
from toolkit.cost.validation import Case, read_cases  # noqa: E402

DATA = Path(__file__).resolve().parent / "data"
FILES = ("published.csv", "published_2.csv", "published_3.csv")
NOT_FITTED = ("megatron-bridge-moe", "moe-modelzoo", "ms-swift", "ds-autotune-v100")
"""Sources that no constant is fitted to: mixtures whose recompute is not stated, and noisy ones."""
NCCL = ("intra", "rank_latency", "node_latency", "ramp_seconds")
THIN = {
    "vtrain-single": 9, "llm-foundry": 5, "bigscience-a100": 3, "dgxc-24.11": 2, "fms-accel": 3, "internevo": 2,
    "deepspeed-azure-zero3": 3,
}  # fmt: skip
"""Sources with many rows: every n-th row is enough to fit."""
PRIOR = 0.03
"""Weight of staying near the start (in logs), so that constants which the data don't show stay put."""
ROUGH = {
    "matmul": 0.9, "attention": 0.8, "attention_tokens": 800, "stream": 0.7, "launch_seconds": 2e-5,
    "kernel_seconds": 3e-6, "tp_exposed": 0.5, "interference": 0.5, "network_interference": 0.2, "pipeline_waits": 1.5,
    "zero_host_seconds": 2e-4, "fixed_seconds": 1e-2, "power": 0.4, "misaligned": 0.7,
}  # fmt: skip
"""Where leaving one source out starts, so that nothing of the source left out is in the start."""
STEP = tuple(ROUGH)
SOFT = 0.04
"""Errors below this count squared, above it by their size."""
REMOVED = {
    "element-wise operators": {"stream": 1e6},
    "attention": {"attention": 1e6},
    "launches of the host": {"launch_seconds": 1e-12},
    "links inside a node": {"intra": 1e6},
    "network between nodes": {"inter": 1e6},
    "interference of hidden traffic": {"interference": 1e-9, "network_interference": 1e-9},
    "host work of ZeRO 3": {"zero_host_seconds": 1e-12},
    "power limit": {"power": 1e-9},
}


def minimise(
    residuals: Callable[[np.ndarray], np.ndarray], start: np.ndarray, *, steps: int, reach: float = 1.5
) -> np.ndarray:
    """Levenberg-Marquardt with a numeric Jacobian, within `reach` of the start."""
    x, r, damping = start.copy(), residuals(start), 1e-2
    for _ in range(steps):
        jacobian = np.stack([(residuals(x + d) - r) / 2e-3 for d in np.eye(len(x)) * 2e-3], axis=1)
        square, slope = jacobian.T @ jacobian, jacobian.T @ r
        before = r @ r
        for _ in range(4):
            step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), -slope)
            y = np.clip(x + np.clip(step, -0.5, 0.5), start - reach, start + reach)
            found = residuals(y)
            if found @ found < before:
                x, r, damping = y, found, damping / 5
                break
            damping *= 6
        if before - r @ r < 1e-5 * before:
            break
    return x


def fit(cases: Sequence[Case], names: Sequence[str], start: Calibration, steps: int = 10) -> Calibration:
    """The constants that make the smooth absolute error of log step time smallest."""
    counts = Counter(case.source for case in cases)
    weight = np.array([1 / math.sqrt(counts[case.source]) for case in cases])
    origin = np.array([math.log(getattr(start, name)) for name in names])

    def residuals(x: np.ndarray) -> np.ndarray:
        forget()
        cal = _with(start, names, x)
        errors = np.array([math.log(seconds(case.execution, cal).total / case.seconds) for case in cases])
        soft = np.sign(errors) * np.sqrt(np.sqrt(errors**2 + SOFT**2) - SOFT)
        return np.concatenate([soft * weight, PRIOR * (x - origin)])

    return _with(start, names, minimise(residuals, origin, steps=steps))


def forget() -> None:
    """Empty the caches, which other constants would fill without end."""
    for cached in (operators.gemm_seconds, operators.layer_cost, operators.head_cost, operators.power_share):
        cached.cache_clear()


def _with(start: Calibration, names: Sequence[str], logs: np.ndarray) -> Calibration:
    return replace(start, **{name: float(math.exp(value)) for name, value in zip(names, logs, strict=True)})


def thinned(cases: Iterable[Case]) -> list[Case]:
    """The rows to fit: every n-th row of the sources that have very many."""
    seen: Counter[str] = Counter()
    kept = []
    for case in cases:
        seen[case.source] += 1
        if case.source not in NOT_FITTED and seen[case.source] % THIN.get(case.source, 1) == 0:
            kept.append(case)
    return kept


def ratios(cases: Iterable[Case], cal: Calibration) -> dict[str, list[tuple[Case, float]]]:
    """Predicted over measured step time, by source."""
    forget()
    found = defaultdict(list)
    for case in cases:
        assert case.seconds
        found[case.source].append((case, seconds(case.execution, cal).total / case.seconds))
    return found


def mape(cases: Iterable[Case], cal: Calibration) -> float:
    """Mean over sources of each source's mean absolute error."""
    return mean(mean(abs(ratio - 1) for _, ratio in rows) for rows in ratios(cases, cal).values())


def print_sources(title: str, cases: Sequence[Case], cal: Calibration) -> None:
    """A line a source."""
    print(f"\n{title}: {mape(cases, cal):.2%} (mean over sources)")
    for source, rows in sorted(ratios(cases, cal).items()):
        errors = [ratio - 1 for _, ratio in rows]
        size = mean(map(abs, errors))
        print(f"  {source:24s} {len(errors):4d} rows   MAPE {size:6.1%}   bias {mean(errors):+6.1%}")


def leave_one_out(cases: Sequence[Case], start: Calibration) -> None:
    """Fit without a source, predict it; then the intervals that its residuals give."""
    found: dict[str, list[tuple[Case, float]]] = {}
    for source in sorted({case.source for case in cases}):
        cal = fit(thinned(c for c in cases if c.source != source), STEP, start, steps=4)
        found |= ratios([c for c in cases if c.source == source], cal)
    errors = {source: mean(abs(ratio - 1) for _, ratio in rows) for source, rows in found.items()}
    print(f"\nleaving one source out: {mean(errors.values()):.2%}")
    for source, error in errors.items():
        print(f"  {source:24s} {error:6.1%}")
    intervals(found)


def intervals(found: dict[str, list[tuple[Case, float]]]) -> None:
    """Quantiles of measured over predicted by kind, sources weighted equally, and the share of rows inside."""
    kinds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    inside: dict[str, list[bool]] = defaultdict(list)
    for source, rows in found.items():
        for case, ratio in rows:
            kind = kind_of(case.execution)
            kinds[kind].append((1 / ratio, 1 / len(rows)))
            inside[source].append(STEP_TIME[kind].low <= 1 / ratio <= STEP_TIME[kind].high)
    print("\nmeasured over predicted, 10% and 90% quantiles by kind")
    for kind, values in sorted(kinds.items()):
        print(f"  {kind:12s} {len(values):4d} rows  {quantile(values, 0.1):.2f} to {quantile(values, 0.9):.2f}")
    share = mean(mean(rows) for rows in inside.values())
    rows = [one for found in inside.values() for one in found]
    print(f"inside the intervals of uncertainty.py: {share:.0%} (mean over sources), {mean(rows):.0%} of rows")


def quantile(values: Sequence[tuple[float, float]], share: float) -> float:
    """A weighted quantile of (value, weight)."""
    total, below = sum(weight for _, weight in values), 0.0
    for value, weight in sorted(values):
        below += weight
        if below >= share * total:
            return value
    return max(value for value, _ in values)


def ablations(cases: Sequence[Case], start: Calibration) -> None:
    """Take a term away, fit the others again, and see what it costs."""
    base = mape(cases, start)
    print("\nwithout a term (others fitted again): change of the mean error")
    for title, change in REMOVED.items():
        names = [name for name in STEP if name not in change]
        cal = fit(thinned(cases), names, replace(start, **change), steps=4)
        print(f"  {title:32s} {mape(cases, cal) - base:+7.2%}")


def nccl_cases(path: Path) -> list[tuple[Cluster, int, float, float]]:
    """(cluster, ranks, bytes, seconds) of every A100 and H100 timing."""
    cases = []
    for row in csv.DictReader(path.open()):
        device = find_device(row["gpu"])
        ranks, per_node = int(row["n_gpus"]), int(row["gpus_per_node"])
        if device is None or device.name.startswith("V100"):
            continue
        nodes, each = max(1, ranks // per_node), min(ranks, per_node)
        cluster = Cluster(
            name=row["source_id"], device=device, nodes=nodes, devices_per_node=each, host_memory_bytes=0,
            intra_bytes_per_second=device.link_bytes_per_second, inter_bytes_per_second=device.inter_gbps * 1e9 / 8,
        )  # fmt: skip
        cases.append((cluster, ranks, float(row["bytes"]), float(row["time_us"]) * 1e-6))
    return cases


def nccl_errors(cases: Iterable[tuple[Cluster, int, float, float]], cal: Calibration) -> list[float]:
    """Signed relative errors of all-reduce."""
    return [all_reduce(size, group(c, ranks, 1), c, cal) / measured - 1 for c, ranks, size, measured in cases]


def fit_nccl(start: Calibration) -> Calibration:
    """Constants of the collectives from timings."""
    cases = nccl_cases(DATA / "nccl_allreduce.csv")
    origin = np.array([math.log(getattr(start, name)) for name in NCCL])

    def residuals(x: np.ndarray) -> np.ndarray:
        errors = np.log1p(np.array(nccl_errors(cases, _with(start, NCCL, x))))
        return np.sign(errors) * np.sqrt(np.sqrt(errors**2 + SOFT**2) - SOFT)

    found = _with(start, NCCL, minimise(residuals, origin, steps=10))
    for title, cal in (("in calibration.py", start), ("fitted again", found)):
        error = median(map(abs, nccl_errors(cases, cal)))
        print(f"NCCL all-reduce, {len(cases)} timings, {title}: median error {error:.1%}")
    print("  " + ", ".join(f"{name} {getattr(found, name):.4g}" for name in NCCL))
    return found


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loo", action="store_true", help="leave one source out (some minutes)")
    parser.add_argument("--ablations", action="store_true", help="take one term away at a time (some minutes)")
    args = parser.parse_args()
    rows = [row for name in FILES for row in read_rows(DATA / name)]
    cases = [case for case in read_cases(rows)[0] if case.seconds]
    fit_nccl(CALIBRATION)
    print(f"\n{len(CONSTANTS)} constants in calibration.py")
    found = fit(thinned(cases), STEP, CALIBRATION)
    for name in STEP:
        print(f"  {name:22s} now {getattr(CALIBRATION, name):10.4g}   fitted {getattr(found, name):10.4g}")
    for split in ("calib", "dev"):
        of_split = [case for case in cases if case.row.text("split") == split]
        print_sources(f"{split}, constants as in calibration.py", of_split, CALIBRATION)
    if args.loo:
        leave_one_out(cases, replace(CALIBRATION, **ROUGH))
    if args.ablations:
        ablations(cases, CALIBRATION)


if __name__ == "__main__":
    main()
