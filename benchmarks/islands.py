"""Islands over a slow link: speed and loss against synchronous training, in few bits, of unequal speed, and killed.

python -m benchmarks.islands link [--steps 200] [--warm 400] [--json FILE]    # as root: it makes network namespaces
python -m benchmarks.islands fresh [--steps 600] [--warm 0] [--mbit 50] [--seed 0] [--only REGEX] [--json FILE]
python -m benchmarks.islands turns [--steps 300] [--mbit 50]     # speed with a slow link over that with a fast one
python -m benchmarks.islands slow|unequal|kills [--steps N] [--json FILE]
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.link_turns import Turns, set_limit
from benchmarks.harness.slow_link import Link, address, move_into
from benchmarks.harness.unequal_islands import in_turns, slow_down
from toolkit.checkpoints import store
from toolkit.launching import launchers
from toolkit.recipe.file import load_recipe
from toolkit.resources import find_recipe
from toolkit.run_dir import heartbeat
from toolkit.run_dir.async_islands import gather
from toolkit.run_dir.layout import RunDir
from toolkit.runtime.supervision.warm_pool import WarmProcess, enter_worker, run_warm
from toolkit.sessions.islands import local_store, prepare_islands, watch_islands
from toolkit.sessions.resolve import resolve

MBIT = 50
ROUND = 50
LARGE = (
    "model.config.hidden_size=384", "model.config.intermediate_size=1024", "model.config.num_hidden_layers=6",
    "data.seq_len=64", "train.global_batch=8", "train.lr=5e-4", "metrics.console=false",
    "metrics.wandb={mode: disabled}", "checkpoint.every=0", "data.eval_fraction=0.05", "train.eval_every=100000",
    "train.eval_samples=128",
)  # fmt: skip
"""The demo with 10 million parameters, evaluated on held-out text after the last step."""
SMALL = (
    "data.seq_len=128", "train.global_batch=8", "train.lr=2e-3", "metrics.console=false",
    "metrics.wandb={mode: disabled}",
)  # fmt: skip
SYNC = ("strategy={name: data_parallel}",)
ISLANDS = (f"strategy={{name: local_sgd, islands: 2, local_steps: {ROUND}, zero_stage: 0}}",)


@dataclass(frozen=True)
class Run:
    """What a run has measured."""

    name: str
    losses: list[float]
    tokens_per_second: float
    link_bytes: int = 0
    """Sent by the first site."""
    extra: dict[str, Any] = field(default_factory=dict)
    held_out: float | None = None
    """Loss of the model that the run ends with on held-out text."""

    @property
    def final(self) -> float:
        """Loss at the end: on held-out text, or the mean of the last tenth of the steps."""
        return self.held_out or statistics.mean(self.losses[-max(1, len(self.losses) // 10) :])


@dataclass(frozen=True)
class Sited:
    """A worker in its site's network: the first half of the ranks in one, the rest in the other."""

    spaces: tuple[str, str]
    ranks: int

    def __call__(self, argv: tuple[str, ...], env: dict[str, str]) -> None:
        move_into(Path("/run/netns") / self.spaces[int(env["RANK"]) * 2 // self.ranks])
        enter_worker(argv, {**env, "MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": "eth0"})


def over_link(name: str, overrides: Sequence[str], *, mbit: int | None, ranks: int = 4) -> Run:
    """A run of two sites with a link between them, limited or not."""
    with tempfile.TemporaryDirectory(prefix="islands-") as folder, Link() as link:
        if mbit:
            set_limit(link, mbit)
        run = two_sites(Path(folder) / "run", overrides, link, ranks)
        sent = subprocess.run(
            ["ip", "netns", "exec", link.space(0), "cat", "/sys/class/net/eth0/statistics/tx_bytes"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        return measured(name, run, int(sent.stdout))


def two_sites(folder: Path, overrides: Sequence[str], link: Link, ranks: int = 4) -> RunDir:
    """The run directory of a run that is over, half of whose ranks were on either side of a link."""
    run = resolve(load_recipe(find_recipe("demo"), [*LARGE, *overrides]), ranks).write(folder)
    enter = Sited((link.space(0), link.space(1)), ranks)
    codes = run_warm(launchers.commands("local", run.path, ranks, "cpu"), enter)
    assert not any(codes), "\n".join(path.read_text()[-2000:] for path in run.path.glob("logs/*"))
    return run


TURN_SECONDS = 15.0


def turns(steps: int, mbit: int) -> list[Run]:
    """Islands over a link whose limit is switched on and off: how much of their speed they keep with it."""
    with tempfile.TemporaryDirectory(prefix="islands-") as folder, Link() as link:
        with Turns(link, mbit, TURN_SECONDS) as switched:
            run = two_sites(Path(folder) / "run", [f"train.steps={steps}", *STREAMED], link)
        kept, count = switched.speed_kept(map(json.loads, run.metrics.read_text().splitlines()))
        print(f"2 bits every 4 steps: {kept} x the speed without a limit, {count} steps, {mbit} Mbit/s", flush=True)
        return [measured(f"2 bits every 4 steps, {mbit} Mbit/s on and off", run)]


def measured(name: str, run: RunDir, link_bytes: int = 0) -> Run:
    """Speed over all but the first steps."""
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    steady = records[min(3, len(records) // 2) :]
    speed = sum(record["tokens"] for record in steady) / sum(record["wall_seconds"] for record in steady)
    held_out = None
    if run.evaluations.is_file():
        held_out = float(json.loads(run.evaluations.read_text().splitlines()[-1])["loss"])
    found = Run(name, [record["loss"] for record in records], speed, link_bytes, held_out=held_out)
    waited = (records[-1].get("exchange") or {}).get("waited_seconds", 0.0)
    print(
        f"{name}: {speed:,.0f} tokens/s, final loss {found.final:.4f}, {link_bytes / 1e6:,.1f} MB sent,"
        f" {waited:.1f} s waited for exchanges", flush=True,
    )  # fmt: skip
    return found


def warmed(steps: int, folder: Path, begin: Sequence[str] = ()) -> Path:
    """A checkpoint of so many synchronous steps inside one site, without a link: where islands begin.

    Models that have hardly learned anything can't be averaged; DiLoCo begins with trained ones, too.
    """
    given = [*LARGE, *SYNC, *begin, f"train.steps={steps}", f"checkpoint.every={steps}", "train.schedule=constant"]
    run = resolve(load_recipe(find_recipe("demo"), given), 2).write(folder / "warm")
    assert not any(run_warm(launchers.commands("local", run.path, 2, "cpu"))), run.log(0).read_text()[-2000:]
    measured(f"{steps} steps in one site", run)
    return store.path_of(run.checkpoints, steps)


def link(steps: int, warm: int) -> list[Run]:
    """Every-step synchronisation and islands, over a slow link and over a fast one, all from one checkpoint."""
    with tempfile.TemporaryDirectory(prefix="islands-") as folder:
        start = [f"checkpoint.resume={warmed(warm, Path(folder))}"] if warm else []
        return _link(start, steps, warm)


def _link(start: list[str], steps: int, warm: int) -> list[Run]:
    count = [f"train.steps={warm + steps}", *start]
    behind = "mode: overlap, delay_steps: 20"
    overlap = f"train.outer={{{behind}}}"
    slow_sync = over_link("every step, 50 Mbit/s", [f"train.steps={warm + 8}", *start, *SYNC], mbit=MBIT)
    sync = over_link("every step, no limit", [*count, *SYNC], mbit=None)
    free = over_link("islands, no limit", [*count, *ISLANDS, overlap], mbit=None)
    apart = over_link("islands, 50 Mbit/s", [*count, *ISLANDS, overlap], mbit=MBIT)
    few = over_link("islands, 50 Mbit/s, 8 bits", [*count, *ISLANDS, f"train.outer={{{behind}, bits: 8}}"], mbit=MBIT)
    print(f"islands against every step on the slow link: {apart.tokens_per_second / slow_sync.tokens_per_second:.1f} x")
    print(f"islands on the slow link against no limit: {apart.tokens_per_second / free.tokens_per_second:.3f} x")
    print(f"loss after the same tokens: {apart.final / sync.final - 1:+.2%} against synchronous training")
    print(f"8 bits: {apart.link_bytes / few.link_bytes:.2f} x fewer bytes, loss {few.final / apart.final - 1:+.2%}")
    return [slow_sync, sync, free, apart, few]


FEW_BITS = "strategy={name: local_sgd, islands: 2, local_steps: 4, zero_stage: 0}"
MUON = ("train.optimizer=muon", "train.lr=1e-3")
STREAMED = (FEW_BITS, "train.outer={bits: 2, mode: overlap, fragments: auto}")
FRESH = {
    "2 bits every 4 steps": STREAMED,
    "2 bits every 6 steps": (FEW_BITS.replace("4,", "6,"), STREAMED[1]),
    # Under ZeRO 1 the ranks of an island share the work on matrices; without ZeRO each does all of it.
    "2 bits every 4 steps, Muon": (FEW_BITS.replace("stage: 0", "stage: 1"), STREAMED[1], *MUON),
    "auto": (
        FEW_BITS.replace("4,", "auto,"),
        "train.outer={bits: auto, mode: overlap, fragments: auto}",
    ),
}
"""Islands from random weights: name → overrides."""
FREE_STEPS = 300
"""Steps without a limit of the link, for the islands' own speed."""


def in_one_process(name: str, overrides: Sequence[str]) -> Run:
    """Synchronous training without a link: the loss that islands are compared with."""
    with tempfile.TemporaryDirectory(prefix="islands-") as folder:
        run = resolve(load_recipe(find_recipe("demo"), [*LARGE, *SYNC, *overrides]), 1).write(Path(folder) / "run")
        assert not any(run_warm(launchers.commands("local", run.path, 1, "cpu"))), run.log(0).read_text()[-2000:]
        return measured(name, run)


def fresh(steps: int, mbit: int, seed: int, warm: int, only: str) -> list[Run]:
    """Islands over a slow link: speed and bytes against every step in fp32, loss against one process.

    `only`: names of the runs that are made. `warm`: all begin with a checkpoint of so many synchronous steps.
    """
    with tempfile.TemporaryDirectory(prefix="islands-") as folder:
        begin = [f"train.seed={seed}"]
        if warm:
            begin += [f"checkpoint.resume={warmed(warm, Path(folder), begin)}"]
        return list(_fresh(begin, warm, steps, mbit, only).values())


def _fresh(begin: list[str], warm: int, steps: int, mbit: int, only: str) -> dict[str, Run]:
    rate, found = f"{mbit} Mbit/s", dict[str, Run]()

    def count(number: int) -> list[str]:
        return [*begin, f"train.steps={warm + number}"]

    def made(name: str, run: Callable[[str], Run]) -> None:
        if re.fullmatch(only, name):
            found[name] = run(name)

    few = 8 if mbit >= MBIT else 2  # a step takes a minute over a link of 10 Mbit/s
    made("slow", lambda name: over_link(f"every step, {rate}", [*count(few), *SYNC], mbit=mbit))
    free = [*count(min(steps, FREE_STEPS)), *STREAMED]
    made("free", lambda name: over_link("2 bits every 4 steps, no limit", free, mbit=None))
    exact = [*count(steps), FEW_BITS, "train.outer={mode: overlap, fragments: auto}"]
    made("32 bits", lambda name: over_link("32 bits every 4 steps, no limit", exact, mbit=None))
    made("sync", lambda name: in_one_process("every step", count(steps)))
    made("sync, Muon", lambda name: in_one_process("every step, Muon", [*count(steps), *MUON]))
    for name, axes in FRESH.items():
        made(name, lambda name, axes=axes: over_link(f"{name}, {rate}", [*count(steps), *axes], mbit=mbit))
        if name in found:
            print(f"{name}: {_compared(found, name, few, steps)}", flush=True)
    return found


def _compared(found: dict[str, Run], name: str, few: int, steps: int) -> str:
    """A run against those that there are to compare it with."""
    run, said = found[name], []
    if slow := found.get("slow"):
        fewer = slow.link_bytes / few / (run.link_bytes / steps)
        said += [f"{run.tokens_per_second / slow.tokens_per_second:.1f} x as fast as every step"]
        said += [f"{fewer:.0f} x fewer bytes per token"]
    if free := found.get("free"):
        said += [f"{run.tokens_per_second / free.tokens_per_second:.3f} x the speed of {free.name}"]
    if exact := found.get("32 bits"):
        said += [f"{exact.link_bytes / run.link_bytes:.1f} x fewer bytes than {exact.name}"]
    for against in ("sync", "sync, Muon", "32 bits"):
        if other := found.get(against):
            said += [f"held-out loss {run.final / other.final - 1:+.2%} against {other.name}"]
    return ", ".join(said)


@dataclass(frozen=True)
class Lagging:
    """Steps of the second island take so many times as long."""

    times: float

    def __call__(self, argv: tuple[str, ...], env: dict[str, str]) -> None:
        if env.get("TOOLKIT_ISLAND", "0/").startswith("1/"):
            slow_down(self.times)
        enter_worker(argv, env)


def asynchronous(
    name: str,
    overrides: Sequence[str],
    times: float = 1.0,
    disturb: Callable[[RunDir], None] | None = None,
    restarts: int = 0,
) -> tuple[Run, int, str]:
    """Two islands of one process that do not wait for one another; the run, its exit code, what was said."""
    with tempfile.TemporaryDirectory(prefix="islands-") as folder:
        resolved = resolve(load_recipe(find_recipe("demo"), [*SMALL, *overrides]), 2)
        run = resolved.write(Path(folder) / "run")
        said, enter = io.StringIO(), Lagging(times)
        with local_store(run) as place:
            parts = prepare_islands(resolved, run, place)
            if disturb:
                threading.Thread(target=disturb, args=(run,), daemon=True).start()
            code = watch_islands(
                parts, Console(file=said, width=200), restarts, lambda command: WarmProcess.start(command, enter)
            )
        gather(run, 2, "done")
        found = measured(name, run)
        fast = measured(f"{name}: island 0", run.island(0))
        steps = sum(json.loads(line)["island"] == 0 for line in run.metrics.read_text().splitlines())
        complete = len(found.losses) == 2 * resolved.recipe.train.steps  # type: ignore[operator]
        extra = {"fast": fast.tokens_per_second, "fast_steps": steps, "complete": complete}
        return Run(name, found.losses, found.tokens_per_second, 0, extra), code, said.getvalue()


def slow(steps: int) -> list[Run]:
    """An island that takes three times as long: what the other one loses, and what the model learns."""
    count = f"train.steps={steps}"
    axes = (
        "strategy={name: local_sgd, islands: 2, local_steps: 10}",
        "train.outer={mode: async}",
        "checkpoint.every=0",
    )
    with tempfile.TemporaryDirectory(prefix="islands-") as folder:
        resolved = resolve(load_recipe(find_recipe("demo"), [*SMALL, count, *SYNC, "checkpoint.every=0"]), 2)
        run = resolved.write(Path(folder) / "run")
        assert not any(run_warm(launchers.commands("local", run.path, 2, "cpu")))
        sync = measured("synchronous", run)
    even, _, _ = asynchronous("asynchronous, equal", [count, *axes])
    lame, _, _ = asynchronous("asynchronous, one 3 x slower", [count, *axes], times=3.0)
    print(f"the fast island keeps {lame.extra['fast'] / even.extra['fast']:.2f} of its speed beside an equal one")
    print(f"it did {lame.extra['fast_steps']} of {2 * steps} steps; all done: {lame.extra['complete']}")
    print(f"loss after the same tokens: {lame.final / sync.final - 1:+.2%} against synchronous training")
    print(f"and {lame.final / even.final - 1:+.2%} against equal islands")
    return [sync, even, lame]


UNEQUAL_BATCH = 12
"""Sequences per step of three islands: each has a third."""


def unequal(steps: int) -> list[Run]:
    """Three islands of 1, 1 and 2 processes, one 3 x slower: their speed together against the sum of their own."""
    given = [*SMALL, "checkpoint.every=0", "metrics.detail_every=0"]
    with tempfile.TemporaryDirectory(prefix="islands-") as folder:
        axes = [f"train.steps={steps}", f"train.global_batch={UNEQUAL_BATCH}", *SYNC]
        run = resolve(load_recipe(find_recipe("demo"), [*given, *axes]), 2).write(Path(folder) / "sync")
        assert not any(run_warm(launchers.commands("local", run.path, 2, "cpu")))
        sync = measured("synchronous", run)
        both, alone = in_turns(given, UNEQUAL_BATCH, steps, Path(folder))
        rates, own = both.speeds(), alone.speeds()
        by_step = sorted((record for found in both.records() for record in found), key=lambda record: record["step"])
    assert [record["step"] for record in by_step] == list(range(1, 3 * steps + 1)), "not every step once"
    for name, found in (("own", own), ("together", rates)):
        print(f"{name}: {', '.join(f'{rate:,.0f}' for rate in found)}; {sum(found):,.0f} tokens/s")
    together = Run("unequal islands", [record["loss"] for record in by_step], sum(rates), extra={"own": own})
    print(f"throughput: {sum(rates) / sum(own):.3f} x the sum of their own speeds, {len(alone.turns)} turns each")
    print(f"loss after the same tokens: {together.final / sync.final - 1:+.2%} against synchronous training")
    return [sync, together]


def kills(count: int) -> list[Run]:
    """An island is killed at a random instant, and comes back."""
    axes = (
        "strategy={name: local_sgd, islands: 2, local_steps: 5}", "train.outer={mode: async}", "checkpoint.every=5",
        "train.steps=40",
    )  # fmt: skip
    good, pauses = 0, []
    for number in range(count):
        victim = random.Random(number).randrange(2)
        killed_at: list[float] = []

        def kill(run: RunDir, victim: int = victim, number: int = number, at: list[float] = killed_at) -> None:
            metrics = run.island(victim).metrics
            wanted = random.Random(100 + number).randrange(6, 25)
            while not metrics.is_file() or len(metrics.read_text().splitlines()) < wanted:
                time.sleep(0.02)
            os.kill(heartbeat.read_all(run.island(victim).heartbeats)[0].pid, signal.SIGKILL)
            at.append(time.time())
            other = run.island(1 - victim).metrics
            before = len(other.read_text().splitlines())
            while len(other.read_text().splitlines()) == before:
                time.sleep(0.02)
            at.append(time.time())

        run, code, said = asynchronous(f"kill {number}", list(axes), disturb=kill, restarts=2)
        back = f"island {victim} comes back" in said
        pauses.append(killed_at[1] - killed_at[0] if len(killed_at) == 2 else float("nan"))
        fine = code == 0 and back and run.extra["complete"]
        good += fine
        print(f"kill {number}: island {victim}, the other's next step after {pauses[-1]:.2f} s, "
              f"{'whole' if fine else f'NOT WHOLE: code {code}, {said}'}", flush=True)  # fmt: skip
    print(f"{good} of {count} whole; the others' longest pause {max(pauses):.2f} s")
    return []


def main() -> None:
    """One of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["link", "fresh", "turns", "slow", "unequal", "kills"])
    parser.add_argument("--steps", type=int, default=200, help="or kills (default: %(default)s)")
    parser.add_argument("--warm", type=int, help="steps in one site before (default: 400 for link, 0 for fresh)")
    parser.add_argument("--only", default=".*", help="fresh: which runs (slow, free, sync, ...; default: all)")
    parser.add_argument("--mbit", type=int, default=MBIT, help="fresh: speed of the link (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="fresh: seed of weights and data")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kinds: dict[str, Callable[[], list[Run]]] = {
        "link": lambda: link(args.steps, 400 if args.warm is None else args.warm),
        "fresh": lambda: fresh(args.steps, args.mbit, args.seed, args.warm or 0, args.only),
        "turns": lambda: turns(args.steps, args.mbit),
        "slow": lambda: slow(args.steps),
        "unequal": lambda: unequal(args.steps),
        "kills": lambda: kills(args.steps),
    }
    runs = kinds[args.what]()
    if args.json:
        args.json.write_text(json.dumps([vars(run) for run in runs]))


if __name__ == "__main__":
    main()
