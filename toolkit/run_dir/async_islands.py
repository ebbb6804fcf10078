"""Islands that never wait for one another, as run directories: an order for each, and what they did together."""

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
    """Whether a plan's islands are runs of their own."""
    return plan.islands > 1 and recipe.train.outer is not None and recipe.train.outer.mode == "async"


def write_island(run: RunDir, number: int) -> RunDir:
    """The order of one island: its own plan, and steps of its share of the batch, counted over all islands."""
    order = layout.read(run)
    islands = order.plan.islands
    own = run.island(number)
    (own.path / "logs").mkdir(parents=True, exist_ok=True)
    metrics = order.recipe.metrics
    if number:  # the first one speaks
        metrics = replace(metrics, console=False, wandb=replace(metrics.wandb, mode="disabled"))
    recipe = replace(order.recipe, train=_share(order.recipe.train, islands), metrics=metrics)
    plan = json.loads(run.plan.read_text(encoding="utf-8"))
    plan |= {"islands": 1, "model_flops": plan["model_flops"] / islands}
    plan["hardware_flops"] = plan.get("hardware_flops", 0) / islands
    layout.write(own, recipe, plan, order.deepspeed)
    return own


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
    """The island whose newest checkpoint holds most of what all have learned."""
    return max(range(islands), key=lambda number: (_done(run.island(number)), -number))


def _done(island: RunDir) -> int:
    newest = next(iter(store.steps(island.checkpoints)), None)
    if newest is None:
        return 0
    try:
        text = (store.path_of(island.checkpoints, newest) / "state.json").read_text(encoding="utf-8")
        return len(CompletedRounds.of(json.loads(text)["counters"]))
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # it is damaged; whoever opens it says how


def gather(run: RunDir, islands: int, status: str) -> None:
    """What all islands did, in the run's own directory: metrics in the order of steps, a summary, the last state."""
    records = _records(run, islands)
    lines = (json.dumps(record) + "\n" for _, record in sorted(records.items()))
    run.metrics.write_text("".join(lines), encoding="utf-8")
    best = run.island(furthest(run, islands))
    summaries = [read_json(run.island(number).summary) for number in range(islands)]
    summary = dict(next((found for found in summaries if found), {}))
    losses = [record["loss"] for _, record in sorted(records.items())]
    summary |= {
        "status": status,
        "steps": len(records),
        "first_loss": losses[0] if losses else None,
        "final_loss": losses[-1] if losses else None,
        "tokens": sum(record["tokens"] for record in records.values()),
        "run_dir": str(run.path),
        "islands": [{"island": n, "steps": found.get("steps")} for n, found in enumerate(summaries)],
    }
    run.summary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    newest = next(iter(store.steps(best.checkpoints)), None)
    if newest is not None:
        _adopt(store.path_of(best.checkpoints, newest), run.checkpoints)


def _records(run: RunDir, islands: int) -> dict[int, dict[str, Any]]:
    """Step → record; of a step that was done twice, after an island had left, the later one counts."""
    found: dict[int, dict[str, Any]] = {}
    for number in range(islands):
        path = run.island(number).metrics
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            record = {**json.loads(line), "island": number}
            other = found.get(record["step"])
            if other is None or other["time"] < record["time"]:
                found[record["step"]] = record
    return found


def _adopt(checkpoint: Path, root: Path) -> None:
    """The same files under another directory; links where the disk has them, and all at once."""
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


MAILBOX, ISLAND = "TOOLKIT_MAILBOX", "TOOLKIT_ISLAND"
"""Environment variables: `host:port`, and `island/islands/founder`."""


@dataclass(frozen=True)
class Membership:
    """One island among several."""

    host: str
    port: int
    island: int
    islands: int
    founder: int = 0
    """Whose state all begin with."""

    def env(self) -> dict[str, str]:
        """For its workers."""
        return {MAILBOX: f"{self.host}:{self.port}", ISLAND: f"{self.island}/{self.islands}/{self.founder}"}

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Membership | None:
        """None: the run has no mailbox."""
        if MAILBOX not in env:
            return None
        host, port = parse_address(env[MAILBOX])
        return cls(host, port, *(int(word) for word in env[ISLAND].split("/")))


def parse_address(text: str) -> tuple[str, int]:
    """`host:port`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadInput("--mailbox", f"{text!r} given; HOST:PORT is required, as `toolkit mailbox` prints it")
    return host, int(port)


BELOW, BEYOND = "chunks_below", "chunk."
"""Names in a checkpoint's counters: all chunks below a number are done, and these beyond it."""


@dataclass
class CompletedRounds:
    """Chunks whose changes are in the weights; a chunk is the steps of one round, counted over all islands."""

    below: int = 0
    """All with smaller numbers are done."""
    beyond: set[int] = field(default_factory=set)

    def __contains__(self, chunk: int) -> bool:
        return chunk < self.below or chunk in self.beyond

    def __len__(self) -> int:
        return self.below + len(self.beyond)

    def add(self, chunk: int) -> None:
        """One more is done."""
        assert chunk not in self, f"chunk {chunk} is done twice"
        self.beyond.add(chunk)
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1

    def missing(self, end: int) -> Iterable[int]:
        """Those before `end` that are not done."""
        return [chunk for chunk in range(self.below, end) if chunk not in self.beyond]

    def counters(self) -> dict[str, float]:
        """For a checkpoint."""
        return {BELOW: self.below, **{f"{BEYOND}{chunk}": 1 for chunk in sorted(self.beyond)}}

    @classmethod
    def of(cls, counters: Mapping[str, float]) -> CompletedRounds:
        """From a checkpoint."""
        beyond = {int(name.removeprefix(BEYOND)) for name in counters if name.startswith(BEYOND)}
        return cls(int(counters.get(BELOW, 0)), beyond)
