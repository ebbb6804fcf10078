"""The order of samples in real runs: the same set in each step under every strategy and world size; none lost by stops.

python -m benchmarks.order [--chains 10] [--seed 0]

Each run trains two epochs and tells which samples its ranks took. A chain is such a run that is asked to stop at random
steps and resumed each time under another strategy and world size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.recorded_order import STRATEGIES, WORLDS, missed_and_repeated, steps_of, stopping_at, strategy
from toolkit.errors import Preempted
from toolkit.launching import launchers
from toolkit.recipe.file import make_recipe
from toolkit.run_dir.layout import RunDir
from toolkit.runtime.supervision.warm_pool import run_warm
from toolkit.sessions.resolve import resolve

EPOCHS = 2
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
}


@dataclass(frozen=True)
class Job:
    """Two epochs over a text file, whose last batch is partial."""

    text: Path

    def run(self, directory: Path, name: str, world: int, stop: int | None = None) -> RunDir:
        """Train, or resume, until the end or a stop."""
        mapping: dict[str, Any] = {
            "model": {"config": MODEL, "precision": "fp32"},
            "data": {"path": str(self.text), "tokenizer": "bytes", "seq_len": 60, "cache": str(self.text.parent / "c")},
            "train": {"global_batch": 8, "epochs": EPOCHS, "lr": 1e-2},
            "metrics": {"console": False, "sample_ids": True, "wandb": {"mode": "disabled"}},
        }
        done = resolve(make_recipe(mapping, [strategy(name, world)]), world).write(directory)
        codes = run_warm(launchers.commands("local", done.path, world, "cpu"), stopping_at(stop) if stop else None)
        if set(codes) != {Preempted.exit_code if stop else 0}:
            raise SystemExit(f"{name} with {world} processes ended with {codes}; see {done.path}/logs")
        return done


def main() -> None:
    """Print what was found as JSON; fail if a sample was elsewhere, lost or repeated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chains", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        job = Job(write_text(work / "text.jsonl"))
        one = sets(job.run(work / "one", "zero", 1))
        layouts = [(name, world) for name, world in itertools.product(STRATEGIES, WORLDS)]
        other = 0
        for name, world in layouts:
            done = job.run(work / f"{name}-{world}", name, world)
            differing = sum(a != b for a, b in zip(sets(done), one, strict=True))
            print(f"{name}, {world} processes: {differing} of {len(one)} steps differ", flush=True)
            other += differing
        chains = [chain(job, work / f"chain-{n}", one, random.Random(args.seed + n)) for n in range(args.chains)]
    missed, repeated, moved, stops = (sum(values) for values in zip(*chains, strict=True)) if chains else (0, 0, 0, 0)
    found = {
        "layouts": len(layouts),
        "steps": len(one),
        "samples": EPOCHS * (1 + max(max(step) for step in one)),
        "steps_that_differ": other + moved,
        "chains": len(chains),
        "stops": stops,
        "missed": missed,
        "repeated": repeated,
    }
    print(json.dumps(found, indent=1))
    if other or missed or repeated or moved:
        raise SystemExit(1)


def sets(run: RunDir) -> list[frozenset[int]]:
    """The samples of each step."""
    return [frozenset(step) for step in steps_of(run)]


def chain(job: Job, directory: Path, one: list[frozenset[int]], rng: random.Random) -> tuple[int, int, int, int]:
    """Missed and repeated samples, steps with other samples than one process's, and stops."""
    stops = sorted(rng.sample(range(1, len(one)), rng.randint(1, 2)))
    layouts = rng.sample([(name, world) for name, world in itertools.product(STRATEGIES, WORLDS)], len(stops) + 1)
    for stop, (name, world) in zip([*stops, None], layouts, strict=True):
        done = job.run(directory, name, world, stop)
    missed, repeated = missed_and_repeated(steps_of(done), EPOCHS)
    way = " → ".join(f"{name}@{world}" for name, world in layouts)
    print(f"{way}, stopped after {stops}: {missed} missed, {repeated} repeated", flush=True)
    return missed, repeated, sum(a != b for a, b in zip(sets(done), one, strict=True)), len(stops)


def write_text(path: Path) -> Path:
    """Documents of different lengths."""
    rng = random.Random(0)
    rows = [" ".join(f"word{rng.randrange(99)}" for _ in range(rng.randint(1, 20))) for _ in range(117)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    main()
