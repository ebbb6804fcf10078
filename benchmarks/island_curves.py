"""Loss over tokens, time and bytes on a slow link: every step, local SGD, DiLoCo, streaming, few bits, sparse, async.

Each is a run of its own from the same random weights.

python -m benchmarks.island_curves [--steps 120] [--mbit 50] [--only REGEX] [--json FILE] [--out PNG]    # as root
python -m benchmarks.island_curves --drawn FILE --out PNG

Two sites of two processes, each in a network namespace, with a limited link between them. Bytes are what the first
site's interface has sent: everything counts, heads of packets and the mailbox's protocol too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.harness import browser
from benchmarks.harness.link_turns import set_limit
from benchmarks.harness.slow_link import Link, address, move_into
from benchmarks.islands import SMALL, Sited
from toolkit.launching import launchers
from toolkit.recipe.file import load_recipe
from toolkit.resources import find_recipe
from toolkit.run_dir.async_islands import gather
from toolkit.run_dir.layout import RunDir
from toolkit.runtime.supervision.warm_pool import WarmProcess, enter_worker, run_warm
from toolkit.sessions.islands import MeetingPlace, prepare_islands, watch_islands
from toolkit.sessions.resolve import resolve

PORT = 29400
RANKS = 4
SMOOTHED = 10
"""Steps whose mean loss is drawn."""


def islands(steps: int, outer: str = "") -> tuple[str, ...]:
    """Overrides of two islands that exchange every so many steps."""
    strategy = f"strategy={{name: local_sgd, islands: 2, local_steps: {steps}, zero_stage: 0}}"
    return (strategy, f"train.outer={{{outer}}}")


KINDS: dict[str, tuple[str, ...]] = {
    "every step": ("strategy={name: data_parallel}",),
    "local SGD, every 10 steps": islands(10),
    "DiLoCo, every 10 steps": islands(10, "optimizer: nesterov, lr: 0.7, momentum: 0.9"),
    "streaming, every 10 steps in 5 fragments": islands(10, "mode: overlap, fragments: 5"),
    "2 bits, every 4 steps, streaming": islands(4, "mode: overlap, fragments: auto, bits: 2"),
    "sparse, 5% in 2 bits, every 2 steps": islands(2, "mode: overlap, bits: 2, density: 0.05"),
    "asynchronous, 2 bits, every 10 steps": islands(10, "mode: async, bits: 2"),
}


@dataclass(frozen=True)
class Curve:
    """One run: its loss, and how far tokens, time and bytes had come at each record."""

    name: str
    loss: list[float]
    tokens: list[float]
    seconds: list[float]
    megabytes: list[float]


@dataclass(frozen=True)
class SitedIsland:
    """A worker of an asynchronous island in its site's network."""

    spaces: tuple[str, str]

    def __call__(self, argv: tuple[str, ...], env: dict[str, str]) -> None:
        move_into(Path("/run/netns") / self.spaces[int(env["TOOLKIT_ISLAND"].partition("/")[0])])
        enter_worker(argv, {**env, "GLOO_SOCKET_IFNAME": "lo"})


def measure(name: str, steps: int, mbit: int) -> Curve:
    """Train over a link."""
    with tempfile.TemporaryDirectory(prefix="islands-") as folder, Link() as link:
        set_limit(link, mbit)
        resolved = resolve(load_recipe(find_recipe("demo"), [*SMALL, f"train.steps={steps}", *KINDS[name]]), RANKS)
        run = resolved.write(Path(folder) / "run")
        spaces = (link.space(0), link.space(1))
        with sent_bytes(link) as sent:
            outer = resolved.recipe.train.outer
            if outer and outer.mode == "async":
                with mailbox(link, Path(folder)) as place:
                    parts = prepare_islands(resolved, run, place)
                    enter = SitedIsland(spaces)
                    said = io.StringIO()
                    code = watch_islands(parts, Console(file=said), 0, lambda c: WarmProcess.start(c, enter))
                    assert code == 0, said.getvalue()
                gather(run, 2, "done")
            else:
                codes = run_warm(launchers.commands("local", run.path, RANKS, "cpu"), Sited(spaces, RANKS))
                assert not any(codes), run.log(0).read_text()[-2000:]
        found = curve(name, run, sent)
    print(
        f"{name}: loss {found.loss[-1]:.3f} after {found.seconds[-1]:.0f} s and {found.megabytes[-1]:,.1f} MB",
        flush=True,
    )
    return found


@contextlib.contextmanager
def mailbox(link: Link, folder: Path) -> Iterator[MeetingPlace]:
    """A mailbox in the first site."""
    keys = str(folder / "keys")
    toolkit = [sys.executable, "-m", "toolkit", "mailbox"]
    subprocess.run([*toolkit, "--init", keys, "--host", address(0)], check=True, capture_output=True)
    inside = ["ip", "netns", "exec", link.space(0), *toolkit, "--bind", address(0), "--port", str(PORT)]
    with subprocess.Popen([*inside, "--keys", keys], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        server.stdout.readline()  # it listens
        try:
            yield MeetingPlace(f"https://{address(0)}:{PORT}", f"{keys}/islands.key")
        finally:
            server.terminate()


@contextlib.contextmanager
def sent_bytes(link: Link) -> Iterator[list[tuple[float, float]]]:
    """(seconds since 1970, bytes that the first site has sent): filled twice per second, complete on exit."""
    script = "while sleep 0.5; do echo $(date +%s.%N) $(cat /sys/class/net/eth0/statistics/tx_bytes); done"
    found: list[tuple[float, float]] = []
    with tempfile.TemporaryFile("w+") as file:
        reader = subprocess.Popen(["ip", "netns", "exec", link.space(0), "sh", "-c", script], stdout=file)
        try:
            yield found
        finally:
            reader.terminate()
            reader.wait()
            file.seek(0)
            found += [(float(a), float(b)) for a, b in (line.split() for line in file if line.count(" ") == 1)]


def curve(name: str, run: RunDir, sent: Sequence[tuple[float, float]]) -> Curve:
    """Of a run that is over, in the order in which its steps ended."""
    records = sorted(map(json.loads, run.metrics.read_text().splitlines()), key=lambda record: float(record["time"]))
    begin = records[0]["time"] - records[0]["step_seconds"]
    times = [record["time"] for record in records]
    bytes_then = np.interp(times, *zip(*sent, strict=True)) - np.interp(begin, *zip(*sent, strict=True))
    losses = [record["loss"] for record in records]
    return Curve(
        name,
        [float(np.mean(losses[max(0, at - SMOOTHED + 1) : at + 1])) for at in range(len(losses))],
        np.cumsum([record["tokens"] for record in records]).tolist(),
        [at - begin for at in times],
        (bytes_then / 1e6).tolist(),
    )


def draw(curves: Sequence[Mapping[str, object]], out: Path) -> None:
    """Three panels."""
    import plotly.graph_objects as go
    from plotly.colors import qualitative
    from plotly.subplots import make_subplots

    panels = {"tokens": "tokens", "seconds": "seconds", "megabytes": "MB sent by a site"}
    figure = make_subplots(rows=1, cols=3, shared_yaxes=True, horizontal_spacing=0.02)
    for number, found in enumerate(curves):
        for column, key in enumerate(panels, 1):
            figure.add_trace(
                go.Scatter(
                    x=found[key], y=found["loss"], name=str(found["name"]), mode="lines", showlegend=column == 1,
                    line={"color": qualitative.D3[number], "width": 1.6},
                ),
                row=1, col=column,
            )  # fmt: skip
    for column, (key, title) in enumerate(panels.items(), 1):
        figure.update_xaxes(
            title_text=title, type="linear" if key == "tokens" else "log", dtick=None, row=1, col=column
        )
    figure.update_yaxes(title_text=f"loss (mean of {SMOOTHED} steps)", row=1, col=1)
    figure.update_layout(
        template="plotly_white", width=1180, height=470, legend={"orientation": "h", "y": -0.18},
        margin={"l": 60, "r": 15, "t": 15, "b": 60},
    )  # fmt: skip
    browser.screenshot(figure.to_html(config={"displayModeBar": False}), out, (1200, 490))


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="default: %(default)s")
    parser.add_argument("--mbit", type=int, default=50, help="speed of the link (default: %(default)s)")
    parser.add_argument("--only", default=".*", help="which runs (default: all)")
    parser.add_argument("--json", type=Path, help="keep the curves here")
    parser.add_argument("--drawn", type=Path, help="draw curves that were kept, without a run")
    parser.add_argument("--out", type=Path, default=Path("islands.png"))
    args = parser.parse_args()
    if args.drawn:
        draw(json.loads(args.drawn.read_text()), args.out)
        return
    found = [asdict(measure(name, args.steps, args.mbit)) for name in KINDS if re.fullmatch(args.only, name)]
    if args.json:
        args.json.write_text(json.dumps(found))
    draw(found, args.out)


if __name__ == "__main__":
    main()
