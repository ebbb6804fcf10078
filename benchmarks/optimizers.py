"""Muon and packed states on the demo, against AdamW with fp32 states.

python -m benchmarks.optimizers muon       # rates are tuned for both with one seed; then three seeds at the best rates
python -m benchmarks.optimizers states     # 300 steps with fp32, 8-bit and bf16 states

Muon: both have the demo's schedule over the same 80 steps. Printed is the step at which the mean of Muon's last 8
losses first reaches that of AdamW at the end, relative to 80.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from functools import cache
from pathlib import Path

from toolkit.launching import environment, launchers
from toolkit.recipe.file import load_recipe
from toolkit.runtime.supervision.warm_pool import run_warm
from toolkit.sessions.resolve import resolve

DEMO = Path(__file__).resolve().parents[1] / "recipes" / "demo.yaml"
STEPS, LAST, LONG, TAIL = 80, 8, 300, 20
RATES = {"adamw": (1.5e-3, 3e-3, 6e-3, 1.2e-2), "muon": (3e-3, 6e-3, 1.2e-2, 2.4e-2)}
SEEDS = (0, 1, 2)


@cache
def losses(*overrides: str) -> tuple[float, ...]:
    """Losses of the demo in one process."""
    quiet = ("metrics.console=false", "metrics.detail_every=0", "strategy.name=data_parallel")
    with tempfile.TemporaryDirectory(prefix="optimizers-") as directory:
        run = resolve(load_recipe(DEMO, [*quiet, *overrides]), 1).write(Path(directory) / "run")
        if any(run_warm(launchers.commands("local", run.path, 1, "cpu"))):
            raise RuntimeError(run.log(0).read_text()[-2000:])
        return tuple(json.loads(line)["loss"] for line in run.metrics.read_text().splitlines())


def trained(optimizer: str, lr: float, seed: int) -> tuple[float, ...]:
    """The demo with an optimizer, a learning rate and a seed."""
    return losses(f"train.optimizer={optimizer}", f"train.lr={lr}", f"train.seed={seed}", f"train.steps={STEPS}")


def reached(curve: tuple[float, ...], goal: float) -> int | None:
    """First step at which the mean of the last losses is at most the goal."""
    for step in range(LAST, len(curve) + 1):
        if statistics.fmean(curve[step - LAST : step]) <= goal:
            return step
    return None


def muon() -> None:
    """Tune, then compare with three seeds."""
    best = {}
    for optimizer, rates in RATES.items():
        found = {lr: statistics.fmean(trained(optimizer, lr, SEEDS[0])[-LAST:]) for lr in rates}
        best[optimizer] = min(found, key=lambda lr: found[lr])
        shown = " ".join(f"{lr:g}: {loss:.4f}" for lr, loss in found.items())
        print(f"{optimizer} {shown}; best rate {best[optimizer]:g}", flush=True)
    shares = []
    for seed in SEEDS:
        goal = statistics.fmean(trained("adamw", best["adamw"], seed)[-LAST:])
        curve = trained("muon", best["muon"], seed)
        step = reached(curve, goal)
        shares.append(float("inf") if step is None else step / STEPS)
        print(f"seed {seed}: adamw ends at {goal:.4f}, muon at {statistics.fmean(curve[-LAST:]):.4f}; muon reaches "
              f"adamw's after {step} of {STEPS} steps ({shares[-1]:.2f})", flush=True)  # fmt: skip
    print(f"mean {statistics.fmean(shares):.2f}, largest {max(shares):.2f} (bar 0.75)")


def states() -> None:
    """Compare the last losses of a long run."""
    whole = statistics.fmean(losses(f"train.steps={LONG}")[-TAIL:])
    print(f"fp32: {whole:.4f}", flush=True)
    for kind in ("8bit", "bf16"):
        found = statistics.fmean(losses(f"train.steps={LONG}", f"train.states={kind}")[-TAIL:])
        print(f"{kind}: {found:.4f} ({found / whole - 1:+.2%}; bar 0.5%)", flush=True)


def main() -> int:
    """Run one of the studies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("muon", "states"))
    {"muon": muon, "states": states}[parser.parse_args().study]()
    return 0


if __name__ == "__main__":
    environment.enter_processor_environment()
    sys.exit(main())
