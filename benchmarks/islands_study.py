"""Loss of two islands from random weights against synchronous training on the same tokens: one setting per line.

python -m benchmarks.islands_study [--seeds 0,1,2] [--only REGEX] [--steps 600] [--large] [--out FILE]  # appends lines
python -m benchmarks.islands_study --table FILE                                             # a Markdown table of them

Real runs of two processes: a Llama of 0.1 million parameters on bytes of Python's standard library, batch 16, sequence
64. `--large`: the model of `benchmarks.islands fresh`, 10 million parameters and batch 8, at a quarter of every rate.
A setting is compared with the synchronous run of its own seed and optimizer.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.islands import LARGE
from toolkit.launching import launchers
from toolkit.recipe.file import load_recipe
from toolkit.resources import find_recipe
from toolkit.runtime.supervision.warm_pool import run_warm
from toolkit.sessions.resolve import resolve

BASE = (
    "model.config.hidden_size=64", "model.config.intermediate_size=128", "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=4", "model.config.num_key_value_heads=4", "data.seq_len=64",
    "train.global_batch=16", "train.lr=2e-3", "train.warmup=30", "metrics.console=false", "metrics.detail_every=0",
    "metrics.wandb={mode: disabled}", "checkpoint.every=0", "data.eval_fraction=0.05", "train.eval_every=100000",
    "train.eval_samples=512",
)  # fmt: skip
SYNC = "strategy={name: data_parallel}"


def islands(steps: int | str, outer: str) -> tuple[str, ...]:
    """Two islands that exchange after so many steps."""
    return (f"strategy={{name: local_sgd, islands: 2, zero_stage: 0, local_steps: {steps}}}", f"train.outer={outer}")


MUON = ("train.optimizer=muon", "train.lr=4e-3")
SETTINGS: dict[str, tuple[str, ...]] = {
    "every step": (SYNC,),
    "averaging, H=50": islands(50, "{}"),
    "averaging, H=10, 4 bits": islands(10, "{bits: 4}"),
    "averaging, H=4": islands(4, "{}"),
    "averaging, H=4, 8 bits": islands(4, "{bits: 8}"),
    "averaging, H=4, 2 bits": islands(4, "{bits: 2}"),
    "averaging, H=2, 2 bits": islands(2, "{bits: 2}"),
    "averaging, H=1, 2 bits": islands(1, "{bits: 2}"),
    "averaging, H=6, 2 bits": islands(6, "{bits: 2}"),
    "averaging, H=1, largest 5 % in 2 bits": islands(1, "{bits: 2, density: 0.05}"),
    "averaging, H=2, largest 10 % in 2 bits": islands(2, "{bits: 2, density: 0.1}"),
    "averaging, H=4, 2 bits, rate √2": (*islands(4, "{bits: 2}"), "train.lr=2.83e-3"),
    "averaging, H=4, 2 bits, a step late": islands(4, "{bits: 2, mode: overlap, delay_steps: 1}"),
    "streaming, H=4 in 4 fragments, 2 bits, a step late": islands(4, "{bits: 2, mode: overlap, fragments: 4}"),
    "streaming, H=4 in 4 fragments, 2 bits, waiting": islands(4, "{bits: 2, fragments: 4}"),
    "streaming, H=8 in 4 fragments, 2 bits, 2 steps late": islands(8, "{bits: 2, mode: overlap, fragments: 4}"),
    "DiLoCo (0.7, Nesterov 0.9), H=50": islands(50, "{optimizer: nesterov}"),
    "DiLoCo (0.7, Nesterov 0.9), H=10": islands(10, "{optimizer: nesterov}"),
    "outer rate 1, Nesterov 0.3, H=4, 2 bits": islands(4, "{optimizer: nesterov, lr: 1, momentum: 0.3, bits: 2}"),
    "every step, rate √2": (SYNC, "train.lr=2.83e-3"),
    "every step, Muon": (SYNC, *MUON),
    "averaging, H=4, 2 bits, Muon": (*islands(4, "{bits: 2}"), *MUON),
    "streaming, H=4 in 4 fragments, 2 bits, a step late, Muon": (
        *islands(4, "{bits: 2, mode: overlap, fragments: 4}"),
        *MUON,
    ),
}
"""Name → overrides. A synchronous run is named `every step…` and ends like the settings that it is compared with."""


def scaled(settings: Iterable[str], times: float) -> list[str]:
    """The overrides with every learning rate multiplied."""
    rate = "train.lr="
    return [f"{rate}{float(one.removeprefix(rate)) * times:g}" if one.startswith(rate) else one for one in settings]


def measure(name: str, seed: int, steps: int, *, large: bool = False) -> dict[str, Any]:
    """Held-out loss of a setting, and how many times fewer bytes it sends than fp32 gradients at every step."""
    started = time.time()
    model = (*LARGE, "metrics.detail_every=0") if large else BASE
    settings = scaled(SETTINGS[name], 0.25) if large else SETTINGS[name]
    with tempfile.TemporaryDirectory(prefix="islands-study-") as folder:
        given = [*model, f"train.steps={steps}", f"train.seed={seed}", *settings]
        resolved = resolve(load_recipe(find_recipe("demo"), given), 2)
        run = resolved.write(Path(folder) / "run")
        codes = run_warm(launchers.commands("local", run.path, 2, "cpu"))
        assert not any(codes), "\n".join(path.read_text()[-2000:] for path in run.path.glob("logs/*"))
        last = json.loads(run.metrics.read_text().splitlines()[-1])
        held_out = float(json.loads(run.evaluations.read_text().splitlines()[-1])["loss"])
    parameters = resolved.job.model.params
    sent = (last.get("exchange") or {}).get("sent_bytes")
    fewer = 4 * parameters * steps / sent if sent else 1.0
    return {
        "name": name, "seed": seed, "steps": steps, "parameters": parameters, "held_out": held_out, "fewer": fewer,
        "seconds": time.time() - started,
    }  # fmt: skip


def table(lines: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: a row per setting, means over the seeds and the gap of every seed."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for line in lines:
        found.setdefault(line["name"], {})[line["seed"]] = line
    rows = ["| setting | held-out loss | gap, by seed | mean gap | fewer bytes |", "|---|---:|---|---:|---:|"]
    for name, by_seed in found.items():
        baseline = found.get("every step, Muon" if name.endswith("Muon") else "every step", {})
        gaps = [
            by_seed[seed]["held_out"] / baseline[seed]["held_out"] - 1 for seed in sorted(by_seed.keys() & baseline)
        ]
        loss = statistics.mean(line["held_out"] for line in by_seed.values())
        mean = f"{statistics.mean(gaps):+.1%}" if gaps else ""
        fewer = statistics.mean(line["fewer"] for line in by_seed.values())
        rows.append(f"| {name} | {loss:.3f} | {', '.join(f'{gap:+.1%}' for gap in gaps)} | {mean} | {fewer:.0f}× |")
    return "\n".join(rows)


def main() -> None:
    """Run the settings, or print a table of what was run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default="", help="settings whose names match")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--large", action="store_true", help="10 million parameters")
    parser.add_argument("--out", type=Path, default=Path("islands-study.jsonl"))
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(line) for line in args.table.read_text().splitlines()))
        return
    for seed in map(int, args.seeds.split(",")):
        for name in SETTINGS:
            if not re.search(args.only, name):
                continue
            line = measure(name, seed, args.steps, large=args.large)
            print(json.dumps(line), flush=True)
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
