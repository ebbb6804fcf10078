"""Stop signals at random moments of a run's life, from the first fork to the last byte.

    python -m benchmarks.signals --count 200

Each try starts `toolkit train` with `--max-restarts 2`, sends SIGTERM, SIGUSR1 or SIGHUP, and checks the exit code (75,
or 0 for a run that had finished), that no process is left, and that a resume gives exactly the losses of a run that was
never stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from benchmarks.harness.tiny_llama import TINY_LLAMA

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
STEPS = 40


@dataclass(frozen=True)
class Outcome:
    """How one try ended."""

    signal: str
    after_seconds: float
    """From the first fork to the signal."""
    code: int
    orphans: int
    exact: bool
    """Whether the resumed run has the losses of a run that was never stopped."""
    text: str

    @property
    def ok(self) -> bool:
        """Whether nothing went wrong."""
        return self.code in (0, 75) and not self.orphans and self.exact


def write_recipe(directory: Path) -> Path:
    """Write a recipe that trains for some seconds, with checkpoints, and return its path."""
    recipe = {
        "name": "signals",
        "model": {"config": dict(TINY_LLAMA), "precision": "fp32"},
        "data": {"path": "synthetic", "tokenizer": "bytes", "seq_len": 32},
        "train": {"global_batch": 8, "steps": STEPS, "lr": 1e-2},
        "checkpoint": {"every": 10},
        "metrics": {"console": False, "wandb": {"mode": "disabled"}},
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def losses(run: Path) -> dict[int, float]:
    """Step → loss of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def command(*words: str) -> list[str]:
    """A command of the toolkit."""
    return [sys.executable, "-m", "toolkit.cli", *words]


def reference(recipe: Path, run: Path) -> tuple[dict[int, float], float]:
    """Losses of a run that is never stopped, and its seconds from the first fork to the end."""
    process = start(recipe, run)
    forked = wait_for_fork(process)
    process.communicate()
    assert process.returncode == 0, "the run without a signal failed"
    return losses(run), time.monotonic() - forked


def start(recipe: Path, run: Path) -> subprocess.Popen[str]:
    """Start a run of two processes."""
    words = ("train", str(recipe), "--nproc", "2", "--run-dir", str(run), "--max-restarts", "2")
    return subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_fork(process: subprocess.Popen[str]) -> float:
    """Wait until the command has its first child; return the time."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None and not children.read_text().strip():
        time.sleep(0.002)
    return time.monotonic()


def try_one(recipe: Path, run: Path, expected: dict[int, float], number: signal.Signals, seconds: float) -> Outcome:
    """Start, wait, send the signal, look at what is left, resume."""
    process = start(recipe, run)
    wait_for_fork(process)
    time.sleep(seconds)
    if process.poll() is None:
        os.kill(process.pid, number)
    text, _ = process.communicate(timeout=120)
    orphans = len(leftovers(run))
    exact = process.returncode == 0
    if process.returncode == 75 and (run / "recipe.yaml").is_file():
        done = subprocess.run(command("resume", str(run)), capture_output=True, text=True, timeout=300)
        exact = done.returncode == 0 and losses(run) == expected
        text += done.stdout + done.stderr
    return Outcome(number.name, seconds, process.returncode, orphans, exact, text)


def leftovers(run: Path) -> list[int]:
    """Processes that still name the run directory on their command line."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and str(run) in words:
            found.append(process.info["pid"])
    return found


def measure(count: int, seed: int) -> list[Outcome]:
    """Try so many random moments."""
    generator, outcomes = random.Random(seed), []
    with tempfile.TemporaryDirectory(prefix="signals-") as name:
        directory = Path(name)
        recipe = write_recipe(directory)
        expected, life = reference(recipe, directory / "reference")
        for number in range(count):
            seconds = generator.uniform(0, life)
            chosen = SIGNALS[number % 3] if number % 2 else signal.SIGTERM
            outcomes.append(try_one(recipe, directory / f"run-{number}", expected, chosen, seconds))
            show(number, outcomes[-1])
    return outcomes


def show(number: int, outcome: Outcome) -> None:
    """Print one try; with everything that was said if it went wrong."""
    words = f"{outcome.signal} after {outcome.after_seconds:.2f} s: exit code {outcome.code}"
    print(f"{number + 1}: {words}, {outcome.orphans} orphans, exact resume {outcome.exact}", flush=True)
    if not outcome.ok:
        print(outcome.text, flush=True)


def main() -> int:
    """Measure and print the counts; the exit code is 1 if a try went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    outcomes = measure(args.count, args.seed)
    print(
        f"{sum(one.ok for one in outcomes)} of {len(outcomes)} ok; exit codes {dict(Counter(o.code for o in outcomes))}"
    )
    return 0 if all(one.ok for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
