"""Fingerprint of what a refactoring must not change: seeded losses, plans of the shipped recipes, generated configs.

    python benchmarks/fingerprint.py --out before.json      # on the old code
    python benchmarks/fingerprint.py --compare before.json  # on the new: lists every difference, exit code 1 if any

Runs 20 steps of the demo under four strategies, and 10 + 10 steps with a resume between, through the command line
alone, so that the same script runs on any layout of the code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOLKIT = [sys.executable, "-m", "toolkit.cli"]
STRATEGIES = {
    "data_parallel": ["strategy={name: data_parallel}"],
    "zero3": ["strategy={name: zero, zero_stage: 3}"],
    "tensor2": ["strategy={name: tensor_parallel, tp: 2}"],
    "pipeline2": ["strategy={name: pipeline, pp: 2, zero_stage: 0}"],
}
STEPS = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--out", type=Path, help="write the fingerprint here")
    group.add_argument("--compare", type=Path, help="compare with a fingerprint written before")
    args = parser.parse_args()
    found = {"losses": losses(), "plans": plans(), "configs": configs()}
    if args.out:
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
        return 0
    before = json.loads(args.compare.read_text(encoding="utf-8"))
    different = list(differences(before, json.loads(json.dumps(found)), ""))
    print("\n".join(different) or f"equal: {len(found['losses'])} runs, {len(found['plans'])} plans, configs")
    return 1 if different else 0


def losses() -> dict[str, list[list[float]]]:
    """Loss and gradient norm of every step, without a stop and with one."""
    found = {}
    for name, overrides in STRATEGIES.items():
        with tempfile.TemporaryDirectory() as work:
            whole, stopped = Path(work, "whole"), Path(work, "stopped")
            train(whole, [*overrides, f"train.steps={STEPS}"])
            schedule = ["train.warmup=2", "train.schedule=constant", "checkpoint.every=10"]
            train(stopped, [*overrides, f"train.steps={STEPS // 2}", *schedule])
            command = [*TOOLKIT, "resume", str(stopped), f"train.steps={STEPS}", "--nproc", "2"]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            found[name], found[f"{name} resumed"] = trajectory(whole), trajectory(stopped)
    return found


def train(run_dir: Path, overrides: list[str]) -> None:
    command = [*TOOLKIT, "train", "recipes/demo.yaml", *overrides, "metrics.every=1", "--nproc", "2"]
    subprocess.run([*command, "--run-dir", str(run_dir)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def trajectory(run_dir: Path) -> list[list[float]]:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [[row["step"], row["loss"], row["grad_norm"]] for row in rows if "loss" in row and "grad_norm" in row]


def plans() -> dict[str, Any]:
    """`toolkit plan --json` of every shipped recipe."""
    found = {}
    for recipe in sorted((ROOT / "recipes").glob("*.yaml")):
        done = subprocess.run([*TOOLKIT, "plan", str(recipe), "--json"], cwd=ROOT, capture_output=True, check=True)
        found[recipe.stem] = json.loads(done.stdout)
    return found


def configs() -> dict[str, str]:
    """Digests of all files under configs/."""
    paths = sorted(path for path in (ROOT / "configs").rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def differences(before: Any, after: Any, where: str) -> Any:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from differences(before.get(key), after.get(key), f"{where}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{where}/{index}")
    elif before != after:
        yield f"{where}: {before!r} before, {after!r} now"


if __name__ == "__main__":
    sys.exit(main())
