"""Bytes between two hosts for each way to reduce gradients: two network namespaces with two processes each.

    python benchmarks/reduction.py [--steps 12] [--mbit 100] [--out FILE]

Needs root and iproute2. Trains the demo's model with data parallel over the link, reads what the first host sent from
the interface's own counter, and prints bytes per step, seconds per step, and how far the losses are from the flat
reduction's. Bytes are those of the last two steps: a run without them is taken off.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import slow_link  # noqa: E402
from toolkit.launching import launchers  # noqa: E402
from toolkit.recipe.file import load_recipe  # noqa: E402
from toolkit.run_dir.trajectory import largest_difference  # noqa: E402
from toolkit.runtime.supervision.warm_pool import enter_worker, run_warm  # noqa: E402
from toolkit.sessions.resolve import resolve  # noqa: E402

HOSTS, EACH = 2, 2
WAYS: dict[str, tuple[str, ...]] = {
    "flat": (),
    "hierarchical": ("train.reduce.algorithm=hierarchical",),
    "flat, bf16": ("train.reduce.dtype=bf16",),
    "hierarchical, bf16": ("train.reduce.algorithm=hierarchical", "train.reduce.dtype=bf16"),
    "onebit_adam": ("train.optimizer=onebit_adam", "train.freeze_steps=8"),
}


class Enter:
    """A worker inside its host's namespace."""

    def __init__(self, spaces: list[str]) -> None:
        self.spaces = spaces

    def __call__(self, argv: tuple[str, ...], env: dict[str, str]) -> None:
        slow_link.move_into(Path("/run/netns") / self.spaces[int(env["RANK"]) // EACH])
        enter_worker(argv, {**env, "GLOO_SOCKET_IFNAME": "eth0"})


def sent_bytes(space: str) -> int:
    """What a host has sent so far."""
    shown = subprocess.run(["ip", "-n", space, "-s", "-j", "link", "show", "eth0"], capture_output=True, check=True)
    return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


def trained(steps: int, overrides: tuple[str, ...], mbit: int) -> tuple[int, list[dict[str, Any]]]:
    """Bytes that the first host sent in a run, and the run's records."""
    settings = [f"train.steps={steps}", "train.global_batch=4", "data.seq_len=64", "strategy.name=data_parallel"]
    settings += ["train.grad_clip=0", f"cluster={{device: cpu, nodes: {HOSTS}, devices_per_node: {EACH}}}"]
    settings += ["metrics={console: false, detail_every: 0, wandb: {mode: disabled}}"]
    resolved = resolve(load_recipe(ROOT / "recipes" / "demo.yaml", [*settings, *overrides]))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, slow_link.Link() as link:
        spaces = [link.space(host) for host in range(HOSTS)]
        for space in spaces:
            words = ["tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms"]
            subprocess.run(
                ["ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "eth0", "root", *words], check=True
            )
        run = resolved.write(Path(folder) / "run")
        commands = [
            command
            for host in range(HOSTS)
            for command in launchers.commands(
                "local", run.path, EACH, "cpu",
                launchers.Node(processes=EACH, port=29611, address=slow_link.address(0), index=host, count=HOSTS),
            )
        ]  # fmt: skip
        codes = run_warm(commands, Enter(spaces))
        if any(codes):
            raise RuntimeError(f"{overrides} failed: {run.log(0).read_text()[-1500:]}")
        records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        return sent_bytes(spaces[0]), records


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12, help="of each run, from 10 on (default 12)")
    parser.add_argument("--mbit", type=int, default=100, help="rate of the link between hosts")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args()
    if why := slow_link.why_not():
        print(why)
        return 1
    rows: dict[str, dict[str, float]] = {}
    flat: list[float] = []
    for name, overrides in WAYS.items():
        before, _ = trained(args.steps - 2, overrides, args.mbit)
        after, records = trained(args.steps, overrides, args.mbit)
        losses = [record["loss"] for record in records]
        flat = flat or losses
        rows[name] = {
            "bytes_a_step": (after - before) / 2,
            "seconds_a_step": median(record["step_seconds"] for record in records[2:]),
            "loss_apart": largest_difference(flat, losses),
        }
        row, base = rows[name], rows["flat"]
        fewer, faster = (base[key] / row[key] for key in ("bytes_a_step", "seconds_a_step"))
        print(
            f"{name:20s} {row['bytes_a_step'] / 1e6:7.2f} MB ({fewer:4.1f}x fewer)  {row['seconds_a_step']:6.2f} s "
            f"({faster:4.1f}x)  losses {row['loss_apart']:.1e} apart",
            flush=True,
        )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
