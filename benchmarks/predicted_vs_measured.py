"""Predicted against measured on this machine: every plan of a recipe that fits, with real worker processes.

    python benchmarks/predicted_vs_measured.py [RECIPE] [--nproc 4] [--steps 8] [--within 1.5] [--out FILE]

Probes the machine (or reads a probed cluster file), runs each plan, and prints memory and step time side by side, the
rank correlation, and the time of the plan that we would choose over the best measured (regret). Memory on a CPU is the
peak of live tensor bytes of a rank. Step time is the median of the steps after the first three, of the fastest round.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import strategies  # noqa: E402
from toolkit.cost.calibration import cluster_yaml  # noqa: E402
from toolkit.cost.validation import spearman  # noqa: E402
from toolkit.launching import launchers  # noqa: E402
from toolkit.planner.search import OBJECTIVES, Decision, Option, Search  # noqa: E402
from toolkit.plans.job import make_job  # noqa: E402
from toolkit.recipe.file import load_recipe  # noqa: E402
from toolkit.recipe.metrics_sections import Metrics, Wandb  # noqa: E402
from toolkit.recipe.sections import AXES, Recipe, StrategySection  # noqa: E402
from toolkit.sessions.parity import runner  # noqa: E402
from toolkit.sessions.resolve import Resolved  # noqa: E402

MIB = 2**20
SETTLED = 3
"""Steps that are not counted: states are made, memory is watched."""
NEAR_BEST = 1.25
"""Plans that were at most this much slower than the fastest are run again."""


def probe(nproc: int, path: Path) -> None:
    """Measure the machine into a cluster file."""
    import os

    from toolkit.runtime.machine.probe import measure

    found = measure(nproc, lambda what, done, total: print(f"\rprobe {done}/{total} {what:30s}", end="", flush=True))
    print()
    path.write_text(cluster_yaml(found, host_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))


def every_plan(recipe: Recipe) -> tuple[Resolved, Decision]:
    """All plans that fit, without pruning."""
    job = make_job(recipe)
    search = Search(job, prune=False)
    for proposal in strategies.propose(job):
        search.add(proposal)
    decision = search.decision(OBJECTIVES["throughput"])
    return Resolved(recipe=recipe, job=job, decision=decision), decision


def measured(resolved: Resolved, option: Option, steps: int) -> dict[str, float]:
    """Run a plan for real."""
    fixed = {axis: getattr(option.plan, axis) for axis in AXES if axis not in ("islands", "local_steps")}
    recipe = replace(
        resolved.recipe,
        train=replace(resolved.recipe.train, steps=steps, epochs=None),
        strategy=StrategySection(name=option.plan.strategy, **fixed),
        metrics=Metrics(console=False, wandb=Wandb(mode="disabled")),
    )
    order = replace(resolved, recipe=recipe, decision=replace(resolved.decision, chosen=option))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run = order.write(Path(folder) / "run")
        codes = runner("cpu")(launchers.commands("local", run.path, option.plan.devices, "cpu"))
        if any(codes):
            raise RuntimeError(f"{option.plan.describe()} failed: {run.log(0).read_text()[-1500:]}")
        records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return {
        "seconds": median(record["step_seconds"] for record in records[SETTLED:]),
        "memory": max(record["memory_bytes"] for record in records),
    }


def rows_of(resolved: Resolved, decision: Decision, steps: int, rounds: int) -> list[dict[str, Any]]:
    """One row a plan. Other work on the machine only adds time: the fastest round counts, and the plans that may be
    the best, with the one that we would choose, are run in every round."""
    rows = []
    for index, option in enumerate(decision.ranked):
        rows.append(_row(option, measured(resolved, option, steps)))
        print(f"{index + 1:3d}/{len(decision.ranked)} {_line(rows[-1])}", flush=True)
    for number in range(1, rounds):
        best = min(row["measured_seconds"] for row in rows)
        for index, (option, row) in enumerate(zip(decision.ranked, rows, strict=True)):
            if index == 0 or row["measured_seconds"] < NEAR_BEST * best:
                again = measured(resolved, option, steps)["seconds"]
                row["measured_seconds"] = min(row["measured_seconds"], again)
                print(f"round {number + 1} {1e3 * again:8.1f} ms {row['plan']}", flush=True)
    return rows


def _row(option: Option, seen: dict[str, float]) -> dict[str, Any]:
    return {
        "plan": option.plan.describe(),
        "strategy": option.plan.strategy,
        "predicted_seconds": option.estimate.time.total,
        "measured_seconds": seen["seconds"],
        "predicted_memory": option.estimate.memory.total,
        "measured_memory": seen["memory"],
        "parts": vars(option.estimate.memory),
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['plan']:55s} {1e3 * row['predicted_seconds']:8.1f} ms predicted "
        f"{1e3 * row['measured_seconds']:8.1f} measured   {row['predicted_memory'] / MIB:7.1f} MiB predicted "
        f"{row['measured_memory'] / MIB:7.1f} measured {row['predicted_memory'] / row['measured_memory'] - 1:+.1%}"
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors, rank correlation, and regret: rows come ranked, the first is the one that we would run."""
    pairs = [(row["predicted_seconds"], row["measured_seconds"]) for row in rows]
    memory = [abs(row["predicted_memory"] / row["measured_memory"] - 1) for row in rows]
    return {
        "plans": len(rows),
        "memory": {"mape": mean(memory), "worst": max(memory)},
        "step_time": {"mape": mean(abs(p / m - 1) for p, m in pairs), "bias": mean(p / m - 1 for p, m in pairs)},
        "spearman": spearman(pairs),
        "regret": rows[0]["measured_seconds"] / min(measured for _, measured in pairs),
    }


def main() -> None:
    """Probe, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path, default=ROOT / "recipes" / "demo.yaml")
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cluster", type=Path, help="a probed cluster file; default: probe now")
    parser.add_argument("--only", default="", help="plans whose description matches this expression")
    parser.add_argument("--within", type=float, default=float("inf"), help="and predicted so many times the best")
    parser.add_argument("--out", type=Path, help="write rows and summary as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cluster = args.cluster or Path(folder) / "this-machine.yaml"
        if args.cluster is None:
            probe(args.nproc, cluster)
        print(cluster.read_text())
        recipe = load_recipe(args.recipe, [f"cluster={cluster}"])
        resolved, decision = every_plan(recipe)
        longest = args.within * decision.ranked[0].estimate.time.total
        near = [option for option in decision.ranked if option.estimate.time.total <= longest]
        kept = tuple(option for option in near if re.search(args.only, option.plan.describe()))
        rows = rows_of(resolved, replace(decision, ranked=kept), args.steps, args.rounds)
    result = summary(rows)
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps({"summary": result, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
