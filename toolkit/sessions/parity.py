"""Compare strategies with one process: a recipe (parity), or tiny models of every type (coverage)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import strategies
from toolkit.errors import BadInput, RankFailed
from toolkit.launching import launchers
from toolkit.plans.plan import Plan
from toolkit.recipe.metrics_sections import Metrics, Wandb
from toolkit.recipe.sections import Recipe, StrategySection
from toolkit.run_dir.layout import RunDir
from toolkit.run_dir.trajectory import LOSS_TOLERANCE, NORM_TOLERANCE, Trajectory, largest_difference
from toolkit.sessions.resolve import explain, resolve

if TYPE_CHECKING:
    from toolkit.runtime.proofs.coverage import Result

CoverageRows = dict[str, dict[str, "Result"]]
"""Model type → case → result."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one strategy compares with one process."""

    name: str
    plan: Plan | None = None
    trajectory: Trajectory | None = None
    max_rel_diff: float | None = None
    max_rel_norm_diff: float | None = None
    ok: bool = False
    refused: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the entry of one strategy in `toolkit parity --json`."""
        entry: dict[str, Any] = {
            "plan": asdict(self.plan) if self.plan else None,
            "loss": list(self.trajectory.loss) if self.trajectory else [],
            "grad_norm": list(self.trajectory.grad_norm) if self.trajectory else [],
            "max_rel_diff": self.max_rel_diff,
            "max_rel_norm_diff": self.max_rel_norm_diff,
            "ok": self.ok,
        }
        return entry | ({"refused": self.refused} if self.refused else {})


def parity_json(steps: int, reference: Trajectory, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Return what `toolkit parity --json` prints."""
    return {
        "steps": steps,
        "reference": list(reference.loss),
        "strategies": {outcome.name: outcome.to_json() for outcome in outcomes},
    }


def cases(wanted: str, nproc: int) -> dict[str, dict[str, Any]]:
    """Return name → fixed axes, for `all`, or for a comma-separated list of strategies and variants."""
    every = {
        name: {"name": s.name, **axes}
        for s in strategies.registry().values()
        for name, axes in s.variants(nproc).items()
    }
    if wanted == "all":
        return every
    chosen: dict[str, dict[str, Any]] = {}
    for word in wanted.split(","):
        found = {name: axes for name, axes in every.items() if word in (name, axes["name"])}
        if not found:
            raise BadInput("--strategies", f"{word!r} given; use all, or some of: {', '.join(every)}")
        chosen |= found
    return chosen


def reference(recipe: Recipe, steps: int) -> Trajectory:
    """Train the recipe in one process."""
    outcome = _run(_prepared(recipe, steps, {"name": "data_parallel"}), nproc=1)
    return outcome[1]


def compare(recipe: Recipe, steps: int, nproc: int, wanted: str, against: Trajectory) -> Iterator[Outcome]:
    """Train the recipe under each wanted strategy in turn and compare it with the reference."""
    for name, axes in cases(wanted, nproc).items():
        yield _compare(name, _prepared(recipe, steps, axes), nproc, against)


def _compare(name: str, recipe: Recipe, nproc: int, against: Trajectory) -> Outcome:
    resolved = resolve(recipe, nproc)
    if resolved.decision.chosen is None:
        return Outcome(name=name, refused=explain(resolved.decision).splitlines()[-1].strip())
    plan, trajectory = _run(recipe, nproc)
    loss = largest_difference(against.loss, trajectory.loss)
    norm = largest_difference(against.grad_norm, trajectory.grad_norm)
    ok = loss <= LOSS_TOLERANCE[recipe.model.precision] and norm <= NORM_TOLERANCE[recipe.model.precision]
    return Outcome(name=name, plan=plan, trajectory=trajectory, max_rel_diff=loss, max_rel_norm_diff=norm, ok=ok)


def _prepared(recipe: Recipe, steps: int, axes: Mapping[str, Any]) -> Recipe:
    """Return the recipe with a strategy and a number of steps, logging to files only."""
    given = {**recipe.strategy.fixed(), **axes} if recipe.strategy.name == axes["name"] else dict(axes)
    return replace(
        recipe,
        train=replace(recipe.train, steps=steps, epochs=None),
        strategy=StrategySection(**given),
        metrics=Metrics(console=False, wandb=Wandb(mode="disabled")),
    )


def _run(recipe: Recipe, nproc: int) -> tuple[Plan, Trajectory]:
    """Train in real workers, in a temporary run directory."""
    resolved = resolve(recipe, nproc)
    plan, backend = resolved.chosen.plan, resolved.job.cluster.device.backend
    with tempfile.TemporaryDirectory(prefix="parity-") as directory:
        run = resolved.write(Path(directory) / "run")
        commands = launchers.commands("local", run.path, nproc, backend)
        codes = runner(backend)(commands)
        if any(codes):
            rank = next(rank for rank, code in enumerate(codes) if code)
            raise RankFailed(f"{plan.describe()}: rank {rank} failed\n{_tail(run.log(rank))}")
        records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return plan, Trajectory(tuple(r["loss"] for r in records), tuple(r["grad_norm"] for r in records))


def runner(backend: str) -> Callable[[Sequence[launchers.Command]], list[int]]:
    """Return what runs workers: forked ones on a CPU, new processes on an accelerator, which can't be forked."""
    if backend == "cpu":
        from toolkit.runtime.supervision.warm_pool import run_warm

        return run_warm
    from toolkit.runtime.supervision.supervise import run_all

    return lambda commands: [run_all(commands, RunDir(Path(commands[0].argv[-1])))]


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:]) if log.exists() else "(no log)"


def cover_types(types: Sequence[str], cache: Path | None, progress: Callable[[str, int], object]) -> CoverageRows:
    """Train a tiny model of each type under each strategy; results in the cache are not computed again.

    `progress` is called before each type with its name and number.
    """
    from toolkit.runtime.proofs.coverage import Result, cover

    rows = {name: {case: Result(**result) for case, result in row.items()} for name, row in _cached(cache)}
    for number, name in enumerate(types, 1):
        progress(name, number)
        if name not in rows:
            rows[name] = cover(name)
            _append(cache, name, rows[name])
    return {name: rows[name] for name in types}


def _cached(path: Path | None) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    if path is None or not path.exists():
        return []
    return [(line["type"], line["cases"]) for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())]


def _append(path: Path | None, name: str, row: Mapping[str, Result]) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"type": name, "cases": {case: asdict(r) for case, r in row.items()}}) + "\n")
