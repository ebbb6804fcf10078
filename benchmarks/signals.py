"""Stop signals at random moments of a run's life, from the first fork to the last byte.

    python -m benchmarks.signals --count 200
    python -m benchmarks.signals --count 200 --forked

Each try starts `toolkit train` with `--max-restarts 2`, sends SIGTERM, SIGUSR1 or SIGHUP, and checks the exit code (75,
or 0 for a run that had finished), that no process is left, and that a resume gives exactly the losses of a run that was
never stopped. One in four of the stopped runs is resumed by `toolkit resume`; the others by warm workers, which start
sooner and run the same code. Counts are printed after each try, so that they survive an early end. With --forked,
commands and workers are forked from a process that has imported everything: half the time, but no moment during
the imports.
"""

from __future__ import annotations

import argparse
import gc
import importlib
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

from benchmarks.harness import commands, forked_commands
from benchmarks.harness.commands import at_step, leftovers, losses, toolkit
from benchmarks.harness.forked_commands import Forked
from toolkit.launching import launchers
from toolkit.recipe.file import load_recipe
from toolkit.run_dir.layout import RunDir
from toolkit.runtime.supervision.warm_pool import run_warm
from toolkit.sessions.resolve import resolve

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
STEPS = 40
EVERY = 10
BY_COMMAND = 0.25
"""Fraction of stopped runs that are resumed by a command."""


@dataclass(frozen=True)
class Moment:
    """When a signal is sent."""

    step: int
    """After this step; 0: after the first fork."""
    seconds: float
    """So much later."""


@dataclass(frozen=True)
class Outcome:
    """How one try ended."""

    signal: str
    moment: Moment
    code: int
    orphans: int
    exact: bool
    """Whether the run, resumed if it was stopped, has the losses of a run that was never stopped."""
    resumed: str
    """How it was resumed; `not` for a run that had finished, or had written nothing."""
    text: str

    @property
    def ok(self) -> bool:
        """Whether nothing went wrong."""
        return self.code in (0, 75) and not self.orphans and self.exact


def write_recipe(directory: Path) -> Path:
    """Write a recipe that trains for some seconds, with checkpoints, and return its path."""
    return commands.write_recipe(directory, STEPS, EVERY)


Started = subprocess.Popen[str] | forked_commands.Forked


def start(recipe: Path, run: Path, *, forked: bool = False) -> Started:
    """Start a run of two processes."""
    words = ("train", str(recipe), "--nproc", "2", "--run-dir", str(run), "--max-restarts", "2")
    if forked:
        return forked_commands.start(words, run.with_suffix(".txt"))
    return commands.start(toolkit(*words), run)


def reference(recipe: Path, run: Path, *, forked: bool) -> tuple[dict[int, float], float]:
    """Losses of a run that is never stopped, and its seconds from the first fork to the end."""
    process = start(recipe, run, forked=forked)
    forked = wait_for_fork(process)
    text, _ = process.communicate()
    assert process.returncode == 0, text
    return losses(run), time.monotonic() - forked


def wait_for_fork(process: Started) -> float:
    """Wait until the command has its first child; return the time."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None and not children.read_text().strip():
        time.sleep(0.002)
    return time.monotonic()


def try_one(process: Started, run: Path, expected: dict[int, float], number: signal.Signals, moment: Moment) -> Outcome:
    """Wait, send the signal, look at what is left, resume."""
    wait_for_fork(process)
    at_step(run, moment.step, process)
    time.sleep(moment.seconds)
    if process.poll() is None:
        os.kill(process.pid, number)
    text, in_time = commands.finish(process)
    text += "" if in_time else "\nno end in time"
    # Forked workers have no mark.
    orphans, resumed = int(process.leaves_processes()) if isinstance(process, Forked) else len(leftovers(run)), "not"
    if process.returncode == 75 and (run / "recipe.yaml").is_file():
        resumed = "by command" if random.Random(run.name).random() < BY_COMMAND else "by warm workers"
        text += resume(run) if resumed == "by command" else resume_warm(run)
        orphans += len(leftovers(run))
    written = resumed != "not" or process.returncode == 0
    exact = losses(run) == expected if written else not losses(run)
    return Outcome(number.name, moment, process.returncode, orphans, exact, resumed, text)


def resume(run: Path) -> str:
    """Resume with a command; return what it said."""
    process = commands.start(toolkit("resume", str(run)), run)
    return commands.finish(process)[0]


def resume_warm(run: Path) -> str:
    """Resume in warm workers."""
    resolved = resolve(load_recipe(RunDir(run).recipe), 2)
    resolved.write(run, resuming=True)
    return f"exit codes {run_warm(launchers.commands('local', run, 2, 'cpu'))} of warm workers"


def moment_of(generator: random.Random, life_seconds: float) -> Moment:
    """A random moment: any time after the first fork, a step, or close to the end."""
    kind = generator.random()
    if kind < 0.45:
        return Moment(0, generator.uniform(0, life_seconds))
    if kind < 0.85:
        return Moment(generator.randrange(1, STEPS), generator.uniform(0, 0.1))
    return Moment(STEPS, generator.uniform(0, 1.5))


def measure(count: int, seed: int, *, forked: bool) -> list[Outcome]:
    """Try so many random moments."""
    generator = random.Random(seed)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="signals-") as name:
        directory = Path(name)
        recipe = write_recipe(directory)
        expected, life = reference(recipe, directory / "reference", forked=forked)
        for number in range(count):
            chosen = SIGNALS[number % 3] if number % 2 else signal.SIGTERM
            moment = moment_of(generator, life)
            run = directory / f"run-{number}"
            outcomes.append(try_one(start(recipe, run, forked=forked), run, expected, chosen, moment))
            show(outcomes)
    return outcomes


def show(outcomes: list[Outcome]) -> None:
    """Print the last try, with everything that was said if it went wrong, and the counts so far."""
    last = outcomes[-1]
    words = f"{last.signal} {last.moment.seconds:.2f} s after step {last.moment.step}: exit code {last.code}"
    exact = "exact" if last.exact else "NOT exact"
    print(f"{len(outcomes)}: {words}, {last.orphans} orphans, resumed {last.resumed}, {exact}", flush=True)
    if not last.ok:
        print(last.text[-6000:], flush=True)
    print(f"   {summary(outcomes)}", flush=True)


def summary(outcomes: list[Outcome]) -> str:
    """The counts in one line."""
    codes, resumed = Counter(one.code for one in outcomes), Counter(one.resumed for one in outcomes)
    orphans = sum(one.orphans for one in outcomes)
    other = sum(number for code, number in codes.items() if code not in (0, 75))
    return (
        f"{sum(one.ok for one in outcomes)} of {len(outcomes)} ok; exit code 75: {codes[75]}, finished: {codes[0]}, "
        f"other: {other}; {orphans} orphans; resumed {dict(resumed)}"
    )


def main() -> int:
    """Measure and print the counts; the exit code is 1 if a try went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forked", action="store_true", help="fork commands instead of starting Python anew")
    args = parser.parse_args()
    signal.signal(signal.SIGHUP, lambda *_: None)  # under nohup, children would inherit that it is ignored
    if args.forked:
        importlib.import_module("toolkit.preload")
        gc.freeze()  # keeps the garbage collector of each fork off what is imported
    outcomes = measure(args.count, args.seed, forked=args.forked)
    print(summary(outcomes))
    return 0 if all(one.ok for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
