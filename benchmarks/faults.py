"""Faults on a schedule: random disturbances of runs of every strategy, for as long as asked.

    python -m benchmarks.faults --minutes 60

Each try starts a real `toolkit train`, disturbs it, and checks that the command ended in time, that its message names
the cause, that no process is left, and that a resume begins at the newest whole checkpoint and gives exactly the losses
of a run that was never disturbed. Full disks, control groups and lost hosts need root; without it they are left out,
and the last line says so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.harness.checkpoint_layouts import damage
from benchmarks.harness.hosts import Hosts, why_not
from benchmarks.harness.tiny_llama import TINY_LLAMA
from toolkit.checkpoints import store
from toolkit.run_dir.layout import RunDir, check

STEPS = 40
EVERY = 10
STRATEGIES: dict[str, tuple[str, ...]] = {
    "data_parallel": ("strategy.name=data_parallel",),
    "zero_1": ("strategy.name=zero", "strategy.zero_stage=1"),
    "zero_2": ("strategy.name=zero", "strategy.zero_stage=2"),
    "zero_3": ("strategy.name=zero", "strategy.zero_stage=3"),
    "tensor": ("strategy.name=tensor", "strategy.tp=2"),
    "pipeline": ("strategy.name=pipeline", "strategy.pp=2"),
    "sequence": ("strategy.name=sequence", "strategy.sp=2"),
}
SLOW_FSYNC = "import os, time\nreal = os.fsync\nos.fsync = lambda number: (time.sleep(0.3), real(number))[1]\n"
CLOCK_JUMPS = """
import random, time
real, begun = time.time, time.monotonic()
def jumping():
    second = int(time.monotonic())
    return real() + (0 if second < begun + 8 else random.Random(second).uniform(-9e3, 9e3))
time.time = jumping
"""


@dataclass
class Try:
    """One disturbed run."""

    fault: str
    strategy: str
    run: Path
    recipe: Path
    rng: random.Random
    env: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    text: str = ""
    problems: list[str] = field(default_factory=list)

    def start(self, *overrides: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """Start the training command."""
        words = ("train", str(self.recipe), *STRATEGIES[self.strategy], *overrides, "--run-dir", str(self.run))
        options = self.options or ("--nproc", "2")
        return subprocess.Popen(
            [*prefix, *toolkit(*words, *options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **self.env},
        )

    def end(self, process: subprocess.Popen[str], code: int | tuple[int, ...], pattern: str) -> None:
        """Wait for the command; its exit code and message must be those of the fault."""
        wanted = code if isinstance(code, tuple) else (code,)
        try:
            text, _ = process.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
            self.problems.append("no end within 180 s")
        self.text += text
        if process.returncode not in wanted:
            self.problems.append(f"exit code {process.returncode} instead of {wanted}")
        if process.returncode not in (0, 75) and not re.search(pattern, " ".join(text.split())):
            self.problems.append(f"the cause is not named: no {pattern!r}")
        if "Traceback" in text and "its log" not in text:
            self.problems.append("a traceback was shown")

    def at_step(self, step: int, process: subprocess.Popen[str]) -> None:
        """Wait until the run has done so many steps."""
        deadline = time.monotonic() + 120
        while process.poll() is None and len(losses(self.run)) < step and time.monotonic() < deadline:
            time.sleep(0.02)

    def workers(self, process: subprocess.Popen[str]) -> list[psutil.Process]:
        """Worker processes of the command."""
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        return [each for each in family if "toolkit.worker" in " ".join(each.cmdline())]


def toolkit(*words: str) -> list[str]:
    """A command of the toolkit."""
    return [sys.executable, "-m", "toolkit.cli", *words]


def losses(run: Path) -> dict[int, float]:
    """Step → loss of a run; a line that is being written is left out."""
    path, found = run / "metrics.jsonl", {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        found[record["step"]] = record["loss"]
    return found


def kill(one: Try) -> None:
    """SIGKILL of a random worker at a random moment."""
    process = one.start()
    one.at_step(one.rng.randrange(STEPS - 5), process)
    for worker in one.rng.sample(one.workers(process), 1) if one.workers(process) else []:
        worker.kill()
    one.end(process, (0, 4), r"rank \d+ on \S+ was ended by SIGKILL")


def stop(one: Try) -> None:
    """A stop request."""
    process = one.start()
    one.at_step(one.rng.randrange(STEPS - 5), process)
    process.send_signal(one.rng.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]))
    one.end(process, (0, 75), "")


def freeze(one: Try) -> None:
    """A worker that makes no progress."""
    process = one.start("train.hang_timeout_seconds=3")
    one.at_step(one.rng.randrange(1, STEPS - 5), process)
    for worker in one.rng.sample(one.workers(process), 1) if one.workers(process) else []:
        worker.suspend()
    one.end(process, (0, 4), r"no progress for \d+ s.*rank \d+ on \S+ is stopped")


def full_disk(one: Try) -> None:
    """A file system that is full in the middle of a save."""
    room = one.rng.randrange(40, 400)
    with mounted(one.run.parent / f"small-{one.run.name}", room * 1024) as small:
        kept, one.run = one.run, small / "run"
        one.end(one.start(), (0, 4, 6), r"No space left on device|disk is full|is full")
        shutil.copytree(one.run, kept, symlinks=True)
        one.run = kept


def slow_disk(one: Try) -> None:
    """Every sync takes 0.3 s; a worker is killed, often in a save."""
    with injected(one, SLOW_FSYNC):
        process = one.start()
        one.at_step(EVERY * one.rng.randrange(1, STEPS // EVERY), process)
        time.sleep(one.rng.random())
        for worker in one.workers(process)[:1]:
            worker.kill()
        one.end(process, (0, 4), r"rank \d+ on \S+ was ended by SIGKILL")


def clock_jumps(one: Try) -> None:
    """Wall clocks that jump by hours, unlike on every process: nothing may be taken for a hang or a stale lock."""
    with injected(one, CLOCK_JUMPS):
        one.end(one.start(), 0, "")


def damaged(one: Try) -> None:
    """Random damage to the newest checkpoint of a stopped run: named, and the one before it is used."""
    process = one.start()
    one.at_step(STEPS - 8, process)
    process.send_signal(signal.SIGTERM)
    one.end(process, (0, 75), "")
    found = store.steps(RunDir(one.run).checkpoints)
    if len(found) > 1 and process.returncode == 75:
        kind, name = damage(store.path_of(RunDir(one.run).checkpoints, found[0]), one.rng)
        done = subprocess.run(toolkit("verify", str(one.run)), capture_output=True, text=True)
        one.text += done.stdout + done.stderr
        if done.returncode == 0 or Path(name).name not in done.stdout + done.stderr:
            one.problems.append(f"verify does not name the damage ({kind} of {name})")


def out_of_memory(one: Try) -> None:
    """A control group with less memory than the workers need."""
    with memory_group(int(one.rng.uniform(0.5, 0.9) * 2**30)) as enter:
        one.end(one.start(prefix=enter), (0, 4), r"SIGKILL.*(memory|OOM)|memory limit of its control group")


def lost_host(one: Try) -> None:
    """One of two hosts is switched off, or its network goes away."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as root, Hosts(Path(root), 2) as hosts:
        one.env, one.options = hosts.env, ("--hostfile", str(hosts.hostfile(1)))
        process = one.start()
        one.at_step(one.rng.randrange(1, STEPS - 5), process)
        one.rng.choice([hosts.unplug, hosts.power_off])(1)
        one.end(process, (0, 4), re.escape(hosts.addresses[1]))
        one.env, one.options = {}, ()


FAULTS: dict[str, Callable[[Try], None]] = {
    "kill": kill,
    "stop": stop,
    "freeze": freeze,
    "full_disk": full_disk,
    "slow_disk": slow_disk,
    "clock_jumps": clock_jumps,
    "damaged": damaged,
    "out_of_memory": out_of_memory,
    "lost_host": lost_host,
}
NEED_ROOT = ("full_disk", "out_of_memory", "lost_host")


@contextmanager
def mounted(path: Path, size_bytes: int) -> Iterator[Path]:
    """A small file system of its own."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextmanager
def injected(one: Try, code: str) -> Iterator[None]:
    """Code that every Python process of the run executes first."""
    with tempfile.TemporaryDirectory(prefix="injected-") as directory:
        (Path(directory) / "sitecustomize.py").write_text(code)
        one.env = {"PYTHONPATH": directory}
        yield
        one.env = {}


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[tuple[str, ...]]:
    """Start of a command line that runs the rest in a control group with this limit."""
    old = Path("/sys/fs/cgroup/memory")  # version 1
    parent, limit = (old, "memory.limit_in_bytes") if old.is_dir() else (Path("/sys/fs/cgroup"), "memory.max")
    group = parent / f"toolkit-faults-{os.getpid()}"
    group.mkdir()
    (group / limit).write_text(str(limit_bytes))
    try:
        yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$0" "$@"')
    finally:
        deadline = time.monotonic() + 10
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        group.rmdir()


def examine(one: Try, expected: dict[int, float]) -> None:
    """Nothing is left behind, nothing is lost, and a resume is exact."""
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(one.run) in " ".join(p.info["cmdline"] or [])]
    if left:
        one.problems.append(f"processes are left: {left}")
    if not (one.run / "recipe.yaml").exists():  # it ended before there was anything to resume
        return
    checkpoints = RunDir(one.run).checkpoints
    found = [step for step in store.steps(checkpoints) if not check(store.path_of(checkpoints, step))]
    reached = max(losses(one.run), default=0)
    if reached - max(found, default=0) > EVERY * (2 if one.fault in ("damaged", "full_disk") else 1):
        one.problems.append(f"step {reached} was reached, the newest whole checkpoint is {max(found, default=0)}")
    done = subprocess.run(toolkit("resume", str(one.run), "--nproc", "2"), capture_output=True, text=True, timeout=300)
    one.text += done.stdout + done.stderr
    if done.returncode:
        one.problems.append(f"resume ended with {done.returncode}")
    elif losses(one.run) != expected:
        one.problems.append("losses after the resume differ from those of an undisturbed run")


def write_recipe(directory: Path) -> Path:
    """Write a recipe that trains for some seconds, with checkpoints."""
    recipe: dict[str, Any] = {
        "name": "faults",
        "model": {"config": dict(TINY_LLAMA), "precision": "fp32"},
        "data": {"path": "synthetic", "tokenizer": "bytes", "seq_len": 32},
        "train": {"global_batch": 8, "steps": STEPS, "lr": 1e-2},
        "checkpoint": {"every": EVERY, "keep": 3},
        "metrics": {"console": False, "wandb": {"mode": "disabled"}},
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def measure(minutes: float, seed: int, faults: list[str]) -> list[Try]:
    """Disturb runs until the time is over; every fault meets every strategy in turn."""
    rng, tries = random.Random(seed), []
    deadline = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        recipe, expected = write_recipe(Path(name)), {}
        while time.monotonic() < deadline:
            fault = faults[len(tries) % len(faults)]
            strategy = list(STRATEGIES)[(len(tries) // len(faults) + len(tries)) % len(STRATEGIES)]
            if strategy not in expected:
                alone = Try("none", strategy, Path(name) / f"alone-{strategy}", recipe, rng)
                alone.end(alone.start(), 0, "")
                assert not alone.problems, alone.text
                expected[strategy] = losses(alone.run)
            one = Try(fault, strategy, Path(name) / f"run-{len(tries)}", recipe, rng)
            FAULTS[fault](one)
            examine(one, expected[strategy])
            show(len(tries), one)
            tries.append(one)
            shutil.rmtree(one.run, ignore_errors=True)
    return tries


def show(number: int, one: Try) -> None:
    """Print one try; with everything that was said if it went wrong."""
    print(f"{number + 1}: {one.fault}, {one.strategy}: {'; '.join(one.problems) or 'ok'}", flush=True)
    if one.problems:
        print(one.text[-4000:], flush=True)


def main() -> int:
    """Measure and print the counts; the exit code is 1 if a try went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default=",".join(FAULTS), help="comma-separated; default: all")
    args = parser.parse_args()
    asked, without = args.faults.split(","), why_not()
    faults = [fault for fault in asked if not (without and fault in NEED_ROOT)]
    tries = measure(args.minutes, args.seed, faults)
    failed = [one for one in tries if one.problems]
    print(f"{len(tries) - len(failed)} of {len(tries)} ok: {dict(Counter(one.fault for one in tries))}")
    if faults != asked:
        print(f"left out: {', '.join(sorted({*asked} - {*faults}))}: {without}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
