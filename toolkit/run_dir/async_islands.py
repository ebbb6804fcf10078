"""Run directories of asynchronous islands: one per island, and their results merged into that of the run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.checkpoints import store
from toolkit.errors import BadInput
from toolkit.plans.plan import Plan
from toolkit.recipe.sections import Recipe, Train
from toolkit.run_dir import layout
from toolkit.run_dir.layout import RunDir, read_json


def goes_async(recipe: Recipe, plan: Plan) -> bool:
    """Whether the islands of a plan are separate, asynchronous runs."""
    return plan.islands > 1 and recipe.train.outer is not None and recipe.train.outer.mode == "async"


def write_island(run: RunDir, number: int, *, alone: bool = False) -> RunDir:
    """Write the run directory of one island: its plan, and its share of the batch; steps count over all islands.

    `alone`: the command starts this island only. Else only the first one logs to the console.
    """
    spec = layout.read(run)
    islands = spec.plan.islands
    own = run.island(number)
    (own.path / "logs").mkdir(parents=True, exist_ok=True)
    metrics = spec.recipe.metrics
    wandb = replace(metrics.wandb, group=metrics.wandb.group or spec.recipe.name)
    metrics = replace(metrics, console=metrics.console and (alone or not number), wandb=wandb)
    name = f"{spec.recipe.name[:LONGEST_NAME]}-island-{number}"
    recipe = replace(spec.recipe, name=name, train=_share(spec.recipe.train, islands), metrics=metrics)
    plan = json.loads(run.plan.read_text(encoding="utf-8"))
    plan |= {"islands": 1, "model_flops": plan["model_flops"] / islands}
    plan["hardware_flops"] = plan.get("hardware_flops", 0) / islands
    layout.write(own, recipe, plan, spec.deepspeed)
    return own


EXTRA = "extra"
"""Counter in the update store: islands that have joined beyond those of the plan."""
LONGEST_NAME = 80
"""Characters of a run's name that the names of its islands begin with."""


def _share(train: Train, islands: int) -> Train:
    return replace(
        train,
        global_batch=train.global_batch // islands,
        base_batch=None if train.base_batch is None else max(1, train.base_batch // islands),
        steps=None if train.steps is None else train.steps * islands,
        warmup=train.warmup if train.warmup < 1 else train.warmup * islands,
        eval_every=train.eval_every * islands,
    )


def furthest(run: RunDir, islands: int) -> int:
    """The island whose newest checkpoint contains the most completed rounds."""
    return max(_numbers(run, islands), key=lambda number: (_done(run.island(number)), -number))


def _numbers(run: RunDir, islands: int) -> list[int]:
    """The islands of the plan, and those that have joined from this run directory."""
    found = (path.name for path in (run.path / "islands").glob("*"))
    return sorted({*range(islands), *(int(name) for name in found if name.isdecimal())})


def _done(island: RunDir) -> int:
    newest = next(iter(store.steps(island.checkpoints)), None)
    if newest is None:
        return 0
    try:
        text = (store.path_of(island.checkpoints, newest) / "state.json").read_text(encoding="utf-8")
        return len(CompletedRounds.of(json.loads(text)["counters"]))
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # damaged: reported by whoever opens it


def gather(run: RunDir, islands: int, status: str) -> None:
    """Merge the results of all islands into the run's directory: metrics by step, a summary, the last checkpoint."""
    records = _records(run, islands)
    lines = (json.dumps(record) + "\n" for _, record in sorted(records.items()))
    run.metrics.write_text("".join(lines), encoding="utf-8")
    best = run.island(furthest(run, islands))
    numbers = _numbers(run, islands)
    summaries = [read_json(run.island(number).summary) for number in numbers]
    summary = dict(next((found for found in summaries if found), {}))
    losses = [record["loss"] for _, record in sorted(records.items())]
    summary |= {
        "status": status,
        "steps": len(records),
        "first_loss": losses[0] if losses else None,
        "final_loss": losses[-1] if losses else None,
        "tokens": sum(record["tokens"] for record in records.values()),
        "run_dir": str(run.path),
        "islands": [
            {"island": n, "steps": found.get("steps"), **_last_exchange(records, n)}
            for n, found in zip(numbers, summaries, strict=True)
        ],
    }
    run.summary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    newest = next(iter(store.steps(best.checkpoints)), None)
    if newest is not None:
        _adopt(store.path_of(best.checkpoints, newest), run.checkpoints)


def _last_exchange(records: Mapping[int, dict[str, Any]], island: int) -> dict[str, Any]:
    """What an island's last step says about its exchanges: rounds, traffic, and what it did not apply of others."""
    own = [record for record in records.values() if record["island"] == island]
    found = max(own, key=lambda record: record["time"], default={}).get("exchange") or {}
    return {name: value for name, value in found.items() if name != "island"}


def _records(run: RunDir, islands: int) -> dict[int, dict[str, Any]]:
    """Step → record; if a step was repeated after an island had left, the later record."""
    found: dict[int, dict[str, Any]] = {}
    for number in _numbers(run, islands):
        path = run.island(number).metrics
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            record = {**json.loads(line), "island": number}
            other = found.get(record["step"])
            if other is None or other["time"] < record["time"]:
                found[record["step"]] = record
    return found


def _adopt(checkpoint: Path, root: Path) -> None:
    """Add a checkpoint to another directory atomically, with hard links where the file system supports them."""
    root.mkdir(parents=True, exist_ok=True)
    final, work = root / checkpoint.name, root / f".writing-{checkpoint.name}"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(checkpoint, work, copy_function=_link)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(work, final)
    store.point_to(root, final)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


MAILBOX, KEY, ISLAND = "TOOLKIT_MAILBOX", "TOOLKIT_MAILBOX_KEY", "TOOLKIT_ISLAND"
"""Environment variables: address of the update store, file with its key, and `island/islands/founder`."""


@dataclass(frozen=True)
class Membership:
    """What the workers of an asynchronous island know about the others."""

    address: str
    """Where the islands meet, as `parse_address` returns it."""
    key_file: str
    """File with the secret of the run; the secret itself is in no environment and on no command line."""
    island: int
    islands: int
    founder: int = 0
    """The island whose state all others start from."""

    def env(self) -> dict[str, str]:
        """Environment variables for the workers of the island."""
        place = f"{self.island}/{self.islands}/{self.founder}"
        return {MAILBOX: self.address, KEY: self.key_file, ISLAND: place}

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Membership | None:
        """The membership in an environment; None if the run is not asynchronous."""
        if ISLAND not in env:
            return None
        return cls(env[MAILBOX], env[KEY], *(int(word) for word in env[ISLAND].split("/")))


SCHEMES = ("https", "file", "s3", "gs", "az")
"""Kinds of addresses: the server of `toolkit mailbox`, a shared directory, and buckets."""


def parse_address(text: str) -> str:
    """The address of an update store, `HOST:PORT` completed to `https://HOST:PORT`; raises `BadInput` for others."""
    required = (
        "https://HOST:PORT is required, as `toolkit mailbox` prints it, or a directory or bucket that all islands "
        "reach: file:///DIR, s3://BUCKET/PREFIX, gs://…, az://…"
    )
    scheme, separator, rest = text.partition("://")
    address = text if separator else f"https://{text}"
    if separator and scheme not in SCHEMES:
        raise BadInput("--mailbox", f"{text!r} given; {required}")
    if not address.startswith("https://"):
        if not rest.strip("/") or (scheme == "file" and not rest.startswith("/")):
            raise BadInput("--mailbox", f"{text!r} given; {required}")
        return address
    host, _, port = address.removeprefix("https://").rstrip("/").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadInput("--mailbox", f"{text!r} given; {required}")
    return f"https://{host}:{port}"


BELOW, BEYOND = "chunks_below", "chunk."
"""Counters in a checkpoint: all rounds below a number are done, and these single rounds beyond it.

The names say `chunk`, as in earlier versions, so that old checkpoints can be resumed.
"""
ROUND_SAMPLES, RUN_SAMPLES = "round_samples", "run_samples"
"""Counters in a checkpoint: samples of a round and of all rounds, for strategies that count samples."""


@dataclass
class CompletedRounds:
    """Rounds whose updates are in the weights, numbered over all islands."""

    below: int = 0
    """All rounds with smaller numbers are done."""
    beyond: set[int] = field(default_factory=set)
    """Rounds that are done from `below` on."""

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.beyond

    def __len__(self) -> int:
        return self.below + len(self.beyond)

    def add(self, number: int) -> None:
        """Mark a round as done."""
        assert number not in self, f"round {number} is done twice"
        self.beyond.add(number)
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1

    def missing(self, end: int) -> Iterable[int]:
        """Rounds before `end` that are not done."""
        return [number for number in range(self.below, end) if number not in self.beyond]

    def counters(self) -> dict[str, float]:
        """The counters to store in a checkpoint."""
        return {BELOW: self.below, **{f"{BEYOND}{number}": 1 for number in sorted(self.beyond)}}

    @classmethod
    def of(cls, counters: Mapping[str, float]) -> CompletedRounds:
        """The rounds in the counters of a checkpoint."""
        beyond = {int(name.removeprefix(BEYOND)) for name in counters if name.startswith(BEYOND)}
        return cls(int(counters.get(BELOW, 0)), beyond)
