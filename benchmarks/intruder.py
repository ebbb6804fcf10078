"""Attacks of another user of the same host on real runs of two processes: no code may run, no run may end.

    python -m benchmarks.intruder --tries 50
    python -m benchmarks.intruder --tries 50 --open     gloo at loopback, as where namespaces are not allowed

Each try starts a training run and a process of the user `nobody`, which watches for the run's sockets from the first
moment and tries its way in: as a client of the rendezvous store that writes addresses of gloo, in the place of a peer
that gloo waits for, with frames that make no sense, with random bytes, with pickles, with connections that stay open,
by entering its network.
The run must end with exit code 0 and exactly the losses of a run that is left alone. One try in ten is a command of a
launcher; the others run the same code in warm workers, which start sooner. Needs root, to become another user. The
benchmark has a network of its own, so that it attacks nothing else on the host.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import commands, stranger
from toolkit.launching import launchers
from toolkit.launching.private_network import new_network
from toolkit.recipe.file import load_recipe
from toolkit.runtime.supervision.warm_pool import run_warm
from toolkit.sessions.resolve import resolve

NOBODY = 65534
HANG_SECONDS = 600
"""A run that has not ended by then was made to hang; left alone it takes seconds, on a busy machine minutes."""
LAUNCHERS = ("local", "deepspeed", "torchrun", "accelerate")


@dataclass(frozen=True)
class Outcome:
    """How one try ended."""

    kind: str
    how: str
    """The launcher, or `warm`."""
    ended: bool
    """Whether the run ended early or with other losses."""
    executed: bool
    found: dict[str, int]
    """What the stranger counted."""

    @property
    def ok(self) -> bool:
        """Whether the run was not disturbed and no code ran."""
        return not self.ended and not self.executed and not self.found["entered"]


@contextmanager
def attacked(proof: Path, kind: str, uid: int = NOBODY) -> Iterator[dict[str, int]]:
    """Let another user attack what this user starts in the meantime; the counts are there afterwards."""
    python = next((path for path in ("/usr/bin/python3",) if Path(path).exists()), sys.executable)
    source = Path(stranger.__file__).read_text()  # as text: another user may not be able to read this directory
    argv = [python, "-c", source, str(os.getuid()), str(proof), kind]
    found: dict[str, int] = {}
    process = subprocess.Popen(argv, user=uid, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        yield found
    finally:
        text, _ = process.communicate()
        found.update(json.loads(text))


def train(recipe: Path, run: Path, how: str) -> int:
    """Train in two processes; return the exit code, or -1 if there is none in time."""
    if how == "warm":
        return train_warm(recipe, run)
    words = ("train", str(recipe), "--nproc", "2", "--run-dir", str(run), "--launcher", how)
    process = commands.start(commands.toolkit(*words), run)
    try:
        process.communicate(timeout=HANG_SECONDS)
        return process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate()
        return -1


def train_warm(recipe: Path, run: Path) -> int:
    """Train in warm workers."""
    resolve(load_recipe(recipe), 2).write(run)

    def give_up(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(HANG_SECONDS)
    try:
        return max(map(abs, run_warm(launchers.commands("local", run, 2, "cpu"))))
    except TimeoutError:
        return -1
    finally:
        signal.alarm(0)


def try_one(recipe: Path, run: Path, expected: dict[int, float], kind: str, how: str) -> Outcome:
    """Train under one attack."""
    proof = run.parent / "stranger" / f"{run.name}.proof"
    with attacked(proof, kind) as found:
        code = train(recipe, run, how)
    return Outcome(kind, how, code != 0 or commands.losses(run) != expected, proof.exists(), found)


def measure(tries: int, steps: int) -> Iterator[Outcome]:
    """Every attack in turn, on runs of so many steps."""
    with tempfile.TemporaryDirectory(prefix="intruder-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        (directory / "stranger").mkdir()
        os.chown(directory / "stranger", NOBODY, NOBODY)  # where code of the stranger would leave its proof
        recipe = commands.write_recipe(directory, steps, steps // 2, strategy={"name": "data_parallel"})
        assert train(recipe, directory / "alone", "warm") == 0
        expected = commands.losses(directory / "alone")
        kinds = ["enter", *stranger.ATTACKS]
        for number in range(tries):
            how = LAUNCHERS[number // 10 % len(LAUNCHERS)] if number % 10 == 0 else "warm"
            # A launcher meets the attack that takes a peer's place, the strongest one.
            kind = kinds[number % len(kinds)] if how == "warm" else "impersonate"
            yield try_one(recipe, directory / f"run-{number}", expected, kind, how)


def summary(outcomes: list[Outcome]) -> str:
    """The counts in one line."""
    total: Counter[str] = Counter()
    for one in outcomes:
        total.update(one.found)
    ended, executed = sum(one.ended for one in outcomes), sum(one.executed for one in outcomes)
    return f"{len(outcomes)} tries: {executed} executed code, {ended} ended or changed a run; stranger: {dict(total)}"


def main() -> int:
    """Attack and print the counts; the exit code is 1 if a try succeeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tries", type=int, default=50)
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--open", action="store_true", help="let gloo listen where the stranger can connect")
    args = parser.parse_args()
    if os.getuid() != 0:
        parser.error("needs root, to become another user")
    os.close(new_network())  # of this process and those that it starts
    if args.open:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    outcomes: list[Outcome] = []
    for one in measure(args.tries, args.steps):
        outcomes.append(one)
        verdict = "ok" if one.ok else "RUN ENDED OR CHANGED" if one.ended else "CODE EXECUTED, OR A NETWORK ENTERED"
        print(f"{len(outcomes)}: {one.kind}, {one.how}: {verdict}; {one.found}", flush=True)
    print(summary(outcomes))
    return 0 if all(one.ok for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
