"""Asynchronous islands under chaos: killed, stopped, cut off, asked to leave and joined at random, over a real mailbox.

python -m benchmarks.islands_chaos [--steps 11000] [--period 40] [--seed 0] [--calm] [--until 0.5] [--than FILE]
    [--json FILE]

As root. Every island is a `toolkit train` of its own on a core of its own (a third one shares a core), and reaches the
mailbox through a proxy, which can be cut. `--calm`: two islands, undisturbed, for the losses to compare with; `--than`
names what it has written with `--json`. Losses are compared in every twentieth of the steps that both have done.

At the end: all steps done, none missing, no process left, and where the islands' time went (`seconds`, see
`harness/island_time.py`). `useful_share` is the time in steps that count over all the time in which islands lived.
`useful_share_at_large` leaves out the time in which an island was stopped or cut off: nobody can use that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import island_time
from toolkit.run_dir.layout import RunDir

AWAY_SECONDS = 15.0
"""How long an island is stopped or cut off: longer than its lease."""
MOST_ISLANDS = 3
PRIORITY = -10
"""Niceness of the mailbox and of the proxies, which stand for another host and the network between them."""
LOOK_SECONDS = 10.0
"""Between two looks at how far a run is that is to be stopped."""
WINDOWS = 20
"""Parts of a run whose mean losses are compared."""
ROUND = 50
"""Steps of a round: some seconds."""
RECIPE = (
    "data.seq_len=64", "train.global_batch=8", "train.lr=5e-4", "metrics.console=false", "metrics.detail_every=0",
    "model.config.hidden_size=384", "model.config.intermediate_size=1024", "model.config.num_hidden_layers=6",
    "metrics.wandb={mode: disabled}", f"checkpoint.every={20 * ROUND}", "checkpoint.keep=2",
    f"strategy={{name: local_sgd, islands: 2, local_steps: {ROUND}, zero_stage: 0}}",
    "train.outer={mode: async, bits: 2}",
)  # fmt: skip
"""The demo with 10 million parameters."""


class Proxy:
    """A TCP proxy to the mailbox that can be cut: TLS passes through, so islands keep their pinned certificate."""

    def __init__(self, port: int) -> None:
        self._target, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._cut = threading.Event()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self, seconds: float) -> None:
        """Drop every connection and refuse new ones for a while."""
        self._cut.set()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        threading.Timer(seconds, self._cut.clear).start()

    def _serve(self) -> None:
        while True:
            inner, _ = self._listener.accept()
            if self._cut.is_set():
                inner.close()
                continue
            threading.Thread(target=self._pass, args=(inner,), daemon=True).start()

    def _pass(self, inner: socket.socket) -> None:
        with inner, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as outer:
            pair = {inner: outer, outer: inner}
            self._open.update(pair)
            with selectors.DefaultSelector() as ready:
                for one in pair:
                    ready.register(one, selectors.EVENT_READ)
                while True:
                    for event, _ in ready.select():
                        data = event.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                        if not data:
                            return
                        pair[event.fileobj].sendall(data)  # type: ignore[index]
        self._open.discard(inner)


@dataclass
class Site:
    """One island: its command, its proxy and its run directory."""

    name: str
    core: int
    proxy: Proxy
    process: subprocess.Popen[bytes]
    folder: Path
    started: float = field(default_factory=time.time)
    ended: float | None = None
    stopped: list[island_time.Span] = field(default_factory=list)
    cut: list[island_time.Span] = field(default_factory=list)

    @property
    def lives(self) -> bool:
        if self.ended is None and self.process.poll() is not None:
            self.ended = time.time()
        return self.ended is None

    def signal(self, number: signal.Signals) -> None:
        """To the command and its workers, which have process groups of their own."""
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True)
        for pid in [*map(int, listed.stdout.split()), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def records(self) -> list[dict[str, Any]]:
        """Steps that this island has recorded."""
        files = RunDir(self.folder).path.glob("islands/*/metrics.jsonl")
        lines = [line for file in files for line in file.read_text().splitlines()]
        return [json.loads(line) for line in lines if line.endswith("}")]  # a kill may cut the last one

    def life(self) -> island_time.Life:
        """What there is to say about its time."""
        span = (self.started, self.ended or self.started)
        return island_time.Life(span, self.records(), self.stopped, self.cut)


class Chaos:
    """A run and what happens to it."""

    def __init__(self, folder: Path, steps: int, seed: int) -> None:
        self._folder, self._random = folder, random.Random(seed)
        self._steps = steps
        argv = [sys.executable, "-m", "toolkit", "mailbox", "--port", "0", "--keys", str(folder / "keys")]
        self.mailbox = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.mailbox.stdout is not None
        self._port = int(self.mailbox.stdout.readline().split(";")[0].rpartition(":")[2])
        self.sites: list[Site] = []
        self.events: list[tuple[float, str]] = []

    def start(self, *argv: str) -> Site:
        """Start an island: one of the plan's (`--island K`), or one that joins."""
        proxy, number = Proxy(self._port), len(self.sites)
        address = f"https://127.0.0.1:{proxy.port}"
        job = ["demo", "--nproc", "2", *argv, "--mailbox", address, *RECIPE, f"train.steps={self._steps}"]
        key = ["--mailbox-key", str(self._folder / "keys/islands.key")]
        used = Counter(site.core for site in self.living())
        core = min(range(os.cpu_count() or 1), key=lambda one: (used[one], one))
        command = ["nice", "-n", str(-PRIORITY), "taskset", "-c", str(core), sys.executable, "-m", "toolkit", "train"]
        command += [*(job if argv else ["--join", address]), *key]
        folder = self._folder / f"site-{number}"
        log = (self._folder / f"site-{number}.log").open("wb")
        process = subprocess.Popen(
            [*command, "--run-dir", str(folder)], stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        self.sites.append(Site(f"site {number}", core, proxy, process, folder))
        return self.sites[-1]

    def living(self) -> list[Site]:
        """Islands that live; all are asked, so that the end of each is noted in time."""
        return [site for site in self.sites if site.lives]

    def disturb(self) -> None:
        """One event: at least one island stays undisturbed."""
        living = self.living()
        joins = ["join"] if len(living) < MOST_ISLANDS else []
        what = self._random.choice(["kill", "stop", "cut", "leave", *joins])
        if len(living) < 2 or what == "join":
            self._note(f"{self.start().name} joins")
            return
        victim = self._random.choice(living)
        self._note(f"{what}: {victim.name}")
        if what == "kill":
            victim.signal(signal.SIGKILL)
        elif what == "stop":
            victim.stopped.append((time.time(), time.time() + AWAY_SECONDS))
            victim.signal(signal.SIGSTOP)
            threading.Timer(AWAY_SECONDS, victim.signal, [signal.SIGCONT]).start()
        elif what == "cut":
            victim.cut.append((time.time(), time.time() + AWAY_SECONDS))
            victim.proxy.cut(AWAY_SECONDS)
        else:
            victim.process.send_signal(signal.SIGTERM)

    def _note(self, text: str) -> None:
        self.events.append((time.time(), text))
        print(f"{time.strftime('%H:%M:%S')} {text}; living: {sum(site.lives for site in self.sites)}", flush=True)

    def finish(self) -> dict[str, Any]:
        """Wait for the end of the run, and count."""
        while self.living():
            time.sleep(0.5)
        self.mailbox.terminate()
        self.mailbox.wait()
        lives = [site.life() for site in self.sites]
        last = island_time.counting(lives)
        by_site = [island_time.split(life, last, ROUND) for life in lives]
        seconds = sum(by_site, Counter())
        wanted, alive = 2 * self._steps, seconds.total()
        return {
            "steps": len(last),
            "wanted": wanted,
            "missing": len(set(range(1, wanted + 1)) - last.keys()),
            "recorded": sum(len(life.records) for life in lives),
            "useful_share": seconds["training"] / alive,
            "useful_share_at_large": seconds["training"] / (alive - seconds["disturbed"]),
            "seconds": {name: round(spent, 1) for name, spent in seconds.most_common()},
            "seconds_by_site": [{name: round(spent, 1) for name, spent in site.most_common()} for site in by_site],
            "curve": self._curve(last),
            "left": self._left(),
            "codes": [site.process.returncode for site in self.sites],
            "events": [text for _, text in self.events],
            "minutes": (max(site.ended or 0.0 for site in self.sites) - self.sites[0].started) / 60,
        }

    def _curve(self, counted: dict[int, Any]) -> list[float]:
        """Mean loss in each twentieth of the steps, as far as it is complete."""
        size = 2 * self._steps // WINDOWS
        found = []
        for number in range(WINDOWS):
            steps = range(number * size + 1, (number + 1) * size + 1)
            if not all(step in counted for step in steps):
                break
            found.append(statistics.mean(counted[step]["loss"] for step in steps))
        return found

    def has_done(self, share: float) -> bool:
        """Whether so much of the steps is done."""
        return sum(len(site.records()) for site in self.sites) >= share * 2 * self._steps

    def _left(self) -> int:
        """Processes of the run that still live, workers included; those of a killed command have 10 s to end."""
        deadline = time.monotonic() + 10
        while (left := _processes(self._folder)) and time.monotonic() < deadline:
            time.sleep(0.5)
        return left


def _processes(folder: Path) -> int:
    """How many processes name a folder in their command lines."""
    found = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += any(str(folder) in word for word in process.cmdline()) and process.status() != "zombie"
    return found


def run(steps: int, period: float, seed: int, *, calm: bool, until: float = 1.0) -> dict[str, Any]:
    """A run of so many steps, with an event every `period` seconds until it is over.

    `until`: share of the steps after which it is stopped.
    """
    os.nice(PRIORITY)
    with tempfile.TemporaryDirectory(prefix="islands-chaos-") as folder:
        chaos = Chaos(Path(folder), steps, seed)
        for number in range(2):
            chaos.start("--island", str(number))
        after, look = time.monotonic() + 1.5 * period, time.monotonic()
        while chaos.living():
            time.sleep(0.5)
            if until < 1 and time.monotonic() > look:
                look += LOOK_SECONDS
                if chaos.has_done(until):
                    until = 1.0
                    for site in chaos.living():
                        site.process.send_signal(signal.SIGTERM)
            over = any(site.ended and site.process.returncode == 0 for site in chaos.sites)
            if not calm and not over and time.monotonic() > after:
                chaos.disturb()
                after += period
        return chaos.finish()


def main() -> None:
    """Run, and print what was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=11000, help="of the recipe; islands share twice as many")
    parser.add_argument("--period", type=float, default=40.0, help="seconds between two events (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calm", action="store_true", help="undisturbed")
    parser.add_argument("--until", type=float, default=1.0, help="stop after this share of the steps")
    parser.add_argument("--than", type=Path, help="what an undisturbed run has written, to compare the loss with")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = run(args.steps, args.period, args.seed, calm=args.calm, until=args.until)
    if args.than:
        pairs = list(zip(found["curve"], json.loads(args.than.read_text())["curve"], strict=False))
        found["loss_gaps"] = [round(own / other - 1, 4) for own, other in pairs]
    print(json.dumps(found, indent=2))
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
