"""Faults on a schedule: random disturbances of runs of every strategy, for as long as asked.

    python -m benchmarks.faults --minutes 60
    python -m benchmarks.faults --minutes 5 --faults kill,full_disk --strategies zero_3

Each try starts a real `toolkit train`, disturbs it, and checks that the command ended in time, that its message names
the cause and the rank, that no process is left, and that a resume begins at the newest whole checkpoint and gives
exactly the losses of a run that was never disturbed. Full disks, control groups and lost hosts need root; without it
they are left out, and the last line says so. Counts are printed after each try, so that they survive an early end.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import commands
from benchmarks.harness.checkpoint_layouts import damage
from benchmarks.harness.commands import at_step, leftovers, losses, toolkit
from benchmarks.harness.disturbances import CLOCK_JUMPS, SLOW_FSYNC, injected, memory_group, mounted
from benchmarks.harness.disturbed_run import EVERY, LAST, MICRO_BATCH, STEPS, STRATEGIES, Try
from benchmarks.harness.hosts import Hosts, why_not
from toolkit.checkpoints import store
from toolkit.launching import launchers
from toolkit.recipe.file import load_recipe
from toolkit.recipe.sections import Recipe
from toolkit.run_dir.layout import RunDir, check
from toolkit.runtime.models.tiny_models import tiny_of_type
from toolkit.runtime.supervision.warm_pool import run_warm
from toolkit.sessions.resolve import resolve

HANG_SECONDS = 20
KIB = 1024
KILLED = "rank {rank} on \\S+ was ended by SIGKILL"


def kill(one: Try) -> None:
    """SIGKILL of a random worker at a random moment; one time in four of the command, whose workers must then end."""
    process = one.start()
    one.wait_for_moment()
    if one.rng.random() < 0.25:
        process.kill()
        one.disturbed = True
        one.end(-signal.SIGKILL, "")
        deadline = time.monotonic() + 20
        while leftovers(one.run) and time.monotonic() < deadline:
            time.sleep(0.2)
        return
    rank = one.signal_worker(signal.SIGKILL)
    one.end(4 if one.disturbed else 0, KILLED.format(rank=rank))


def stop(one: Try) -> None:
    """SIGSTOP of a random worker: it makes no progress, and is named."""
    one.start(f"train.hang_timeout_seconds={HANG_SECONDS}")
    one.wait_for_moment(first=1)
    rank = one.signal_worker(signal.SIGSTOP)
    one.end(4 if one.disturbed else 0, rf"no progress for \d+ s.*rank {rank} on \S+ is stopped at step")


def preempt(one: Try) -> None:
    """A request to stop."""
    process = one.start()
    one.wait_for_moment()
    process.send_signal(one.rng.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]))
    one.disturbed = True
    one.end(75, "")


def full_disk(one: Try) -> None:
    """A file system that is full: at the start, or at one of the checkpoints."""
    room_bytes = one.rng.choice([one.rng.randrange(8, 64), one.rng.randrange(64, 3000)]) * KIB
    with mounted(one.run.parent / f"small-{one.run.name}", room_bytes) as small:
        kept, one.run = one.run, small / "run"
        one.start()
        one.end((0, 2, 4), r"No space left on device|are free; free some space")
        one.disturbed = one.process is not None and one.process.returncode != 0
        check_orphans(one)
        if one.run.exists():
            shutil.copytree(one.run, kept, symlinks=True)
        one.run = kept


def slow_disk(one: Try) -> None:
    """Every sync takes 0.3 s; a worker is killed, often in a save."""
    with injected(SLOW_FSYNC) as one.env:
        process = one.start()
        at_step(one.run, EVERY * one.rng.randrange(1, LAST // EVERY + 1), process)
        time.sleep(one.rng.random())
        rank = one.signal_worker(signal.SIGKILL)
        one.end(4 if one.disturbed else 0, KILLED.format(rank=rank))


def clock_jumps(one: Try) -> None:
    """Wall clocks that jump by hours, unlike in every process: no hang and no stale lock; a killed rank is named."""
    with injected(CLOCK_JUMPS) as one.env:
        one.start(f"train.hang_timeout_seconds={6 * HANG_SECONDS}")
        if one.rng.random() < 0.5:
            one.disturbed = True
            one.end(0, "")
            return
        one.wait_for_moment(first=1)
        rank = one.signal_worker(signal.SIGKILL)
        one.end(4 if one.disturbed else 0, KILLED.format(rank=rank))


def damaged(one: Try) -> None:
    """Random damage to the files of a stopped run. In a checkpoint it is named, and the one before it is used."""
    process = one.start()
    at_step(one.run, one.rng.randrange(EVERY + 1, LAST), process)
    process.send_signal(signal.SIGTERM)
    one.end((0, 75), "")
    run = RunDir(one.run)
    found = store.steps(run.checkpoints)
    one.disturbed = len(found) > 1
    if one.rng.random() < 0.4:
        garbage = one.rng.choice([b"", b"\xff" * 40, b"[" * 9000, b'{"a": 1}', b"null"])
        for path in (run.plan, run.deepspeed, run.checkpoints / "latest", run.path / "lock.json", run.summary):
            path.write_bytes(garbage)
        with run.metrics.open("ab") as file:
            file.write(b'{"step": 41, "lo')
        return
    if one.disturbed:
        kind, name = damage(store.path_of(run.checkpoints, found[0]), one.rng)
        done = subprocess.run(toolkit("verify", str(one.run)), capture_output=True, text=True)
        one.text += done.stdout + done.stderr
        if done.returncode == 0 or Path(name).name not in "".join((done.stdout + done.stderr).split()):
            one.problems.append(f"verify does not name the damage ({kind} of {name})")


def out_of_memory(one: Try) -> None:
    """A control group runs out of memory at a random moment: the kernel ends the largest process, a worker."""
    with memory_group() as group:
        one.start(prefix=group.prefix)
        one.wait_for_moment(first=1)
        ballast = group.fill()
        one.disturbed = True
        killed = r"rank \d+ on \S+ was ended by SIGKILL.*OOM killer killed [1-9]\d* process"
        one.end(4, killed + r".*memory limit of its control group \S+ \S+ \S+ [\d.]+ GiB")
        ballast.kill()
        ballast.wait()
        check_orphans(one)


def lost_host(one: Try) -> None:
    """One of two hosts is switched off, or its network goes away."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as root, Hosts(Path(root), 2) as hosts:
        one.env, one.options = hosts.env, ("--hostfile", str(hosts.hostfile(one.nproc // 2)))
        process = one.start()
        at_step(one.run, one.rng.randrange(1, LAST), process)
        one.disturbed = process.poll() is None
        one.rng.choice([hosts.unplug, hosts.power_off])(1)
        named = rf"host {re.escape(hosts.addresses[1])} was lost: .*it ran rank"
        one.end(4 if one.disturbed else 0, named)
        deadline = time.monotonic() + 40  # a host without a network notices after 15 s
        while (left := hosts.processes(0) + hosts.processes(1)) and time.monotonic() < deadline:
            time.sleep(0.5)
        if left:
            one.problems.append(f"processes are left on the hosts: {left}")
        one.env, one.options = {}, ()


FAULTS: dict[str, Callable[[Try], None]] = {
    "kill": kill,
    "stop": stop,
    "preempt": preempt,
    "full_disk": full_disk,
    "slow_disk": slow_disk,
    "clock_jumps": clock_jumps,
    "damaged": damaged,
    "out_of_memory": out_of_memory,
    "lost_host": lost_host,
}
WHOLE_COMMAND = ("damaged", "full_disk")
"""Faults after which the command that resumes has something to mend."""
NEED_ROOT = ("full_disk", "out_of_memory", "lost_host")


def check_orphans(one: Try) -> None:
    """No process of the command may be left."""
    if left := leftovers(one.run):
        one.problems.append(f"processes are left: {left}")


def examine(one: Try, expected: dict[int, float]) -> None:
    """Nothing is left behind, nothing is lost, and a resume is exact."""
    check_orphans(one)
    reached = max(losses(one.run), default=0)
    if not (one.run / "recipe.yaml").exists():  # it ended before there was anything to resume
        if reached:
            one.problems.append("there are metrics, but no recipe")
        return
    checkpoints = RunDir(one.run).checkpoints
    found = [step for step in store.steps(checkpoints) if not check(store.path_of(checkpoints, step))]
    newest = max(found, default=0)
    # A checkpoint that was damaged on purpose is lost, and so is one for which there was no room.
    if reached - newest > EVERY * (2 if one.fault in ("damaged", "full_disk") else 1):
        one.problems.append(f"step {reached} was reached, the newest whole checkpoint is {newest}")
    code = resume(one)
    began = [event["step"] for event in events(one.run) if event["kind"] == "resume"]
    if code:
        one.problems.append(f"resume ended with {code}")
    elif losses(one.run) != expected:
        one.problems.append("losses after the resume differ from those of an undisturbed run")
    elif (began[-1] if began else 0) != newest:
        one.problems.append(f"resumed from step {began[-1:]}, the newest whole checkpoint is {newest}")
    check_orphans(one)


def resume(one: Try) -> int:
    """Resume the run, and return the exit code; sometimes in warm workers, which run the same code and start sooner."""
    if one.fault not in WHOLE_COMMAND and one.rng.random() < 0.6:
        recipe = load_recipe(RunDir(one.run).recipe, ["checkpoint.resume=auto"])
        return train_warm(recipe, one.run, one.nproc)
    one.process = process = commands.start(toolkit("resume", str(one.run), "--nproc", str(one.nproc)), one.run)
    one.text += commands.finish(process)[0]
    return process.returncode


def train_warm(recipe: Recipe, run: Path, nproc: int) -> int:
    """Train or resume in warm workers."""
    resolve(replace(recipe, cluster="auto"), nproc).write(run, resuming=run.exists())
    return max(map(abs, run_warm(launchers.commands("local", run, nproc, "cpu"))))


def events(run: Path) -> list[dict[str, Any]]:
    """Events of a run; a line that was cut short by the fault is left out."""
    found = []
    for line in (run / "events.jsonl").read_text().splitlines() if (run / "events.jsonl").exists() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def schedule(faults: Iterable[str], strategies: Iterable[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Every fault with every strategy, in random order, again and again; faults are spread evenly over a round."""
    while True:
        left = {fault: rng.sample(list(strategies), len(list(strategies))) for fault in faults}
        for _ in range(len(list(strategies))):
            yield from ((fault, left[fault].pop()) for fault in rng.sample(list(left), len(left)))


def measure(minutes: float, seed: int, faults: list[str], strategies: list[str]) -> Iterator[Try]:
    """Disturb runs until the time is over."""
    rng, deadline = random.Random(seed), time.monotonic() + 60 * minutes
    expected: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        (Path(name) / "experts").mkdir()
        mixtral = {"config": {**tiny_of_type("mixtral"), "vocab_size": 264}, "precision": "fp32"}
        dense = commands.write_recipe(Path(name), STEPS, EVERY)
        sparse = commands.write_recipe(Path(name) / "experts", STEPS, EVERY, model=mixtral)
        for number, (fault, strategy) in enumerate(schedule(faults, strategies, rng)):
            if time.monotonic() > deadline:
                return
            recipe = sparse if strategy == "expert_parallel" else dense
            if strategy not in expected:
                expected[strategy] = undisturbed(strategy, Path(name) / f"alone-{strategy}", recipe)
            one = Try(fault, strategy, Path(name) / f"run-{number}", recipe, rng)
            try:
                FAULTS[fault](one)
                examine(one, expected[strategy])
            finally:
                if one.process is not None and one.process.poll() is None:
                    one.process.kill()
            yield one
            shutil.rmtree(one.run, ignore_errors=True)


def undisturbed(strategy: str, run: Path, recipe: Path) -> dict[int, float]:
    """Losses of a run without a fault."""
    nproc, axes = STRATEGIES[strategy]
    assert train_warm(load_recipe(recipe, [*axes, MICRO_BATCH]), run, nproc) == 0, strategy
    found = losses(run)
    assert len(found) == STEPS
    return found


def show(tries: list[Try]) -> None:
    """Print the last try, with everything that was said if it went wrong, and the counts so far."""
    one = tries[-1]
    words = "; ".join(one.problems) or ("ok" if one.disturbed else "ok, but the run ended before the fault")
    print(f"{len(tries)}: {one.fault}, {one.strategy}: {words}", flush=True)
    if one.problems:
        print(one.text[-5000:], flush=True)
    print(f"   {summary(tries)}", flush=True)


def summary(tries: list[Try]) -> str:
    """The counts in one line: good and all tries by fault and by strategy."""

    def counts(key: Callable[[Try], str]) -> dict[str, str]:
        every, good = Counter(map(key, tries)), Counter(key(one) for one in tries if not one.problems)
        return {name: f"{good[name]}/{number}" for name, number in sorted(every.items())}

    by = {"by fault": counts(lambda one: one.fault), "by strategy": counts(lambda one: one.strategy)}
    good, reached = sum(not one.problems for one in tries), sum(one.disturbed for one in tries)
    return f"{good} of {len(tries)} ok, {reached} disturbed; {json.dumps(by)}"


def chosen(text: str, known: Iterable[str], parser: argparse.ArgumentParser) -> list[str]:
    """The names in a list with commas."""
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return names


def main() -> int:
    """Measure and print the counts; the exit code is 1 if a try went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default=",".join(FAULTS), help="comma-separated; default: all")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="comma-separated; default: all")
    args = parser.parse_args()
    signal.signal(signal.SIGHUP, lambda *_: None)  # under nohup, children would inherit that it is ignored
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    asked, without = chosen(args.faults, FAULTS, parser), why_not()
    faults = [fault for fault in asked if not (without and fault in NEED_ROOT)]
    tries: list[Try] = []
    for one in measure(args.minutes, args.seed, faults, chosen(args.strategies, STRATEGIES, parser)):
        tries.append(one)
        show(tries)
    if faults != asked:
        print(f"left out: {', '.join(sorted({*asked} - {*faults}))}: {without}")
    return 1 if any(one.problems for one in tries) or not tries else 0


if __name__ == "__main__":
    sys.exit(main())
