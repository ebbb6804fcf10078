"""Refits the cost model's constants and prints its errors: by source, leaving one source out, and term by term.

    python benchmarks/fit_cost_model.py [--csv FILE] [--quick]

Needs scipy. Every source has equal weight; the loss is a smooth absolute error of log step time. The constants that
come out belong in `toolkit/calibration.py`; nothing is written.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import numpy as np
from scipy.optimize import least_squares

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from toolkit.clusters.cluster import Cluster  # noqa: E402
from toolkit.clusters.devices import find_device  # noqa: E402
from toolkit.cost.calibration import CALIBRATION, CONSTANTS, Calibration  # noqa: E402
from toolkit.cost.communication import all_reduce, group  # noqa: E402
from toolkit.cost.published_rows import read_rows  # noqa: E402
from toolkit.cost.timing import seconds  # noqa: E402
from toolkit.cost.validation import Case, read_cases  # noqa: E402

DATA = Path(__file__).resolve().parent / "data"
STEP = ("matmul", "attention", "stream", "launch_seconds", "tp_exposed", "interference", "fixed_seconds")
NCCL = ("intra", "rank_latency", "node_latency", "ramp_seconds")
THIN = {"vtrain-single": 5, "llm-foundry": 3}
"""Sources with hundreds of rows: every n-th row is enough to fit."""
PRIOR = 0.02
"""Weight of staying near the start (in logs), so that constants which the data don't show stay put."""
ROUGH = {
    "matmul": 0.9, "attention": 0.9, "stream": 0.7, "launch_seconds": 2e-5, "tp_exposed": 0.5, "interference": 0.5,
    "fixed_seconds": 1e-2,
}  # fmt: skip
"""Where leaving one source out starts, so that nothing of the source left out is in the start."""
SOFT = 0.03
"""Errors below this count squared, above it by their size."""
REMOVED = {
    "element-wise operators": {"stream": 1e6},
    "attention": {"attention": 1e6},
    "launch floor": {"launch_seconds": 1e-12},
    "links inside a node": {"intra": 1e6},
    "network between nodes": {"inter": 1e6},
    "interference of hidden traffic": {"interference": 1e-9},
    "fixed time": {"fixed_seconds": 1e-12},
    "power limit": {"power": 1e-9},
}


def fit(cases: Sequence[Case], names: Sequence[str], start: Calibration) -> Calibration:
    """The constants that make the smooth absolute error of log step time smallest."""
    counts = Counter(case.source for case in cases)
    weight = np.array([1 / math.sqrt(counts[case.source]) for case in cases])
    origin = np.array([math.log(getattr(start, name)) for name in names])

    def residuals(x: np.ndarray) -> np.ndarray:
        cal = _with(start, names, x)
        errors = np.array([math.log(seconds(case.execution, cal).total / case.seconds) for case in cases])
        soft = np.sign(errors) * np.sqrt(np.sqrt(errors**2 + SOFT**2) - SOFT)
        return np.concatenate([soft * weight, PRIOR * (x - origin)])

    found = least_squares(residuals, origin, diff_step=1e-3, max_nfev=25, bounds=(origin - 1.5, origin + 1.5))
    return _with(start, names, found.x)


def _with(start: Calibration, names: Sequence[str], logs: np.ndarray) -> Calibration:
    return replace(start, **{name: float(math.exp(value)) for name, value in zip(names, logs, strict=True)})


def thinned(cases: Iterable[Case]) -> list[Case]:
    """Every n-th row of the sources that have very many."""
    seen: Counter[str] = Counter()
    kept = []
    for case in cases:
        seen[case.source] += 1
        if seen[case.source] % THIN.get(case.source, 1) == 0:
            kept.append(case)
    return kept


def errors_by_source(cases: Iterable[Case], cal: Calibration) -> dict[str, list[float]]:
    """Signed relative errors."""
    errors = defaultdict(list)
    for case in cases:
        errors[case.source].append(seconds(case.execution, cal).total / case.seconds - 1)
    return errors


def mape(cases: Iterable[Case], cal: Calibration) -> float:
    """Mean over sources of each source's mean absolute error."""
    return mean(mean(abs(e) for e in errors) for errors in errors_by_source(cases, cal).values())


def print_sources(title: str, cases: Sequence[Case], cal: Calibration) -> None:
    """A line a source."""
    print(f"\n{title}: {mape(cases, cal):.2%} (mean over sources)")
    for source, errors in sorted(errors_by_source(cases, cal).items()):
        sizes = [abs(e) for e in errors]
        print(f"  {source:24s} {len(errors):4d} rows   MAPE {mean(sizes):6.1%}   bias {mean(errors):+6.1%}")


def leave_one_out(cases: Sequence[Case], start: Calibration) -> None:
    """Fit without a source, predict it."""
    errors = {}
    for source in sorted({case.source for case in cases}):
        cal = fit(thinned(c for c in cases if c.source != source), STEP, start)
        errors[source] = mape([c for c in cases if c.source == source], cal)
    print(f"\nleaving one source out: {mean(errors.values()):.2%}")
    for source, error in errors.items():
        print(f"  {source:24s} {error:6.1%}")


def ablations(calib: Sequence[Case], dev: Sequence[Case], start: Calibration) -> None:
    """Take a term away, fit the others again, and see what it costs."""
    base = mape(calib, start), mape(dev, start)
    print("\nwithout a term (others fitted again): change of the mean error on calib, dev")
    for title, change in REMOVED.items():
        names = [name for name in STEP if name not in change]
        cal = fit(thinned(calib), names, replace(start, **change))
        print(f"  {title:32s} {mape(calib, cal) - base[0]:+7.2%} {mape(dev, cal) - base[1]:+7.2%}")


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
        return np.log1p(np.array(nccl_errors(cases, _with(start, NCCL, x))))

    found = _with(start, NCCL, least_squares(residuals, origin, loss="soft_l1", f_scale=0.05).x)
    for title, cal in (("in calibration.py", start), ("fitted again", found)):
        error = median(map(abs, nccl_errors(cases, cal)))
        print(f"NCCL all-reduce, {len(cases)} timings, {title}: median error {error:.1%}")
    print("  " + ", ".join(f"{name} {getattr(found, name):.4g}" for name in NCCL))
    return found


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=DATA / "published.csv")
    parser.add_argument("--quick", action="store_true", help="no leave-one-out, no ablations")
    args = parser.parse_args()
    cases = [case for case in read_cases(read_rows(args.csv))[0] if case.seconds]
    calib = [case for case in cases if case.row.text("split") == "calib"]
    dev = [case for case in cases if case.row.text("split") == "dev"]
    fit_nccl(CALIBRATION)
    print(f"\n{len(CONSTANTS)} constants in calibration.py")
    found = fit(thinned(calib), STEP, CALIBRATION)
    for name in STEP:
        print(f"  {name:18s} now {getattr(CALIBRATION, name):10.4g}   fitted {getattr(found, name):10.4g}")
    print_sources("calib, constants as in calibration.py", calib, CALIBRATION)
    print_sources("dev, constants as in calibration.py", dev, CALIBRATION)
    if not args.quick:
        leave_one_out(calib, replace(CALIBRATION, **ROUGH))
        ablations(calib, dev, CALIBRATION)


if __name__ == "__main__":
    main()
