"""Compare strategies with one process: a recipe (parity), or tiny models of every type (coverage)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import strategies
from toolkit.errors import BadInput, RankFailed
from toolkit.launching import launchers
from toolkit.planner.search import Decision
from toolkit.plans.job import raw_config
from toolkit.plans.plan import Plan
from toolkit.plans.split_verdicts import Axes, Proofs
from toolkit.recipe.file import make_recipe
from toolkit.recipe.metrics_sections import Metrics, Wandb
from toolkit.recipe.model_section import Model
from toolkit.recipe.sections import Recipe, StrategySection
from toolkit.run_dir.layout import RunDir
from toolkit.run_dir.trajectory import LOSS_TOLERANCE, NORM_TOLERANCE, Trajectory, largest_difference
from toolkit.sessions.resolve import Resolved, explain, proven, resolve
from toolkit.verdicts import Verdict

if TYPE_CHECKING:
    from toolkit.runtime.proofs.coverage import Case, Findings, Result


@dataclass(frozen=True)
class Row:
    """A line of the coverage table."""

    sizes: str
    """Sizes of the tiny model; empty if no process could train it."""
    results: Mapping[str, Result]
    """Case → result."""


CoverageRows = dict[str, Row]
"""Model type → its line."""


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
    return _run(resolve(_prepared(recipe, steps, {"name": "data_parallel"}), 1), nproc=1)


def compare(recipe: Recipe, steps: int, nproc: int, wanted: str, against: Trajectory) -> Iterator[Outcome]:
    """Train the recipe under each wanted strategy in turn and compare it with the reference."""
    for name, axes in cases(wanted, nproc).items():
        yield _compare(name, _prepared(recipe, steps, axes), nproc, against)


def _compare(name: str, recipe: Recipe, nproc: int, against: Trajectory) -> Outcome:
    try:
        resolved = resolve(recipe, nproc)
    except BadInput as error:  # axes that this model can't have; the reference has shown that the recipe is right
        return Outcome(name=name, refused="; ".join(str(problem) for problem in error.problems))
    if resolved.decision.chosen is None:
        return Outcome(name=name, refused=_why_refused(resolved.decision))
    plan, trajectory = resolved.chosen.plan, _run(resolved, nproc)
    loss = largest_difference(against.loss, trajectory.loss)
    norm = largest_difference(against.grad_norm, trajectory.grad_norm)
    ok = loss <= LOSS_TOLERANCE[recipe.model.precision] and norm <= NORM_TOLERANCE[recipe.model.precision]
    return Outcome(name=name, plan=plan, trajectory=trajectory, max_rel_diff=loss, max_rel_norm_diff=norm, ok=ok)


def _why_refused(decision: Decision) -> str:
    """Return why the plan with the wanted axes was refused, or why there is none."""
    with_plan = [refusal.reason for refusal in decision.refused if refusal.plan is not None]
    return with_plan[-1] if with_plan else explain(decision).splitlines()[-1].strip()


def _prepared(recipe: Recipe, steps: int, axes: Mapping[str, Any]) -> Recipe:
    """Return the recipe with a strategy and a number of steps, logging to files only.

    Checkpoints and evaluations, which are not compared, would take most of the time.
    """
    given = {**recipe.strategy.fixed(), **axes} if recipe.strategy.name == axes["name"] else dict(axes)
    return replace(
        recipe,
        train=replace(recipe.train, steps=steps, epochs=None, eval_every=(steps + 1) * bool(recipe.train.eval_every)),
        checkpoint=replace(recipe.checkpoint, every=0),
        strategy=StrategySection(**given),
        metrics=Metrics(console=False, wandb=Wandb(mode="disabled")),
    )


def _run(resolved: Resolved, nproc: int) -> Trajectory:
    """Train in real workers, in a temporary run directory."""
    plan, backend = resolved.chosen.plan, resolved.job.cluster.device.backend
    with tempfile.TemporaryDirectory(prefix="parity-") as directory:
        run = resolved.write(Path(directory) / "run")
        commands = launchers.commands("local", run.path, nproc, backend)
        codes = runner(backend)(commands)
        if any(codes):
            rank = next(rank for rank, code in enumerate(codes) if code)
            raise RankFailed(f"{plan.describe()}: rank {rank} failed\n{_tail(run.log(rank))}")
        records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return Trajectory(tuple(r["loss"] for r in records), tuple(r["grad_norm"] for r in records))


def runner(backend: str) -> Callable[[Sequence[launchers.Command]], list[int]]:
    """Return what runs workers: forked ones on a CPU, new processes on an accelerator, which can't be forked."""
    if backend == "cpu":
        from toolkit.runtime.supervision.warm_pool import run_warm

        return run_warm
    from toolkit.runtime.supervision.supervise import run_all

    return lambda commands: [run_all(commands, RunDir(Path(commands[0].argv[-1])))]


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:]) if log.exists() else "(no log)"


def cover_types(
    types: Sequence[str], out: Path | None, seed: int, progress: Callable[[str, int], object]
) -> CoverageRows:
    """Train a tiny model of each type under each strategy; types that `out` has for this seed are not computed again.

    `progress` is called before each type with its name and number.
    """
    from toolkit.runtime.supervision.warm_pool import preload

    preload("toolkit.runtime.proofs.scan_imports")
    rows = stored_rows(out, seed)
    for number, name in enumerate(types, 1):
        progress(name, number)
        if name not in rows:
            rows[name] = cover(name, seed=seed)
            _append(out, name, seed, rows[name])
    return {name: rows[name] for name in types}


def cover(model_type: str, cases: Mapping[str, Case] | None = None, seed: int = 0) -> Row:
    """Results of a type under every case, each planned, proven and run as `toolkit train` would."""
    from toolkit.runtime.proofs import coverage

    wanted = coverage.CASES if cases is None else cases
    lora = any(case.lora for case in wanted.values())
    found = _call(coverage.examine, model_type, seed, lora)
    if not isinstance(found, coverage.Findings):
        status = "timeout" if found.late else "untrainable"
        return Row("", {name: coverage.Result(status=status, reason=found.reason) for name in wanted})
    with tempfile.TemporaryDirectory(
        prefix="coverage-"
    ) as directory:  # verdicts of other versions of the code do not count
        proofs = Proofs(Path(directory) / "proofs.json")
        for adapted in (False, True):
            _prove_together([case for case in wanted.values() if case.lora is adapted], found, proofs)
        results = {name: _covered(case, found, proofs) for name, case in wanted.items()}
    return Row(found.sizes, results)


def _call(function: Callable[..., Any], *args: Any, nproc: int = 1) -> Any:
    """Call a function in warm workers; of one worker return its result, of several a list."""
    from toolkit.runtime.proofs.coverage import TIMEOUT_SECONDS
    from toolkit.runtime.supervision.warm_pool import call_on_ranks

    results = call_on_ranks(function, *args, nproc=nproc, timeout_seconds=TIMEOUT_SECONDS)
    return results if nproc > 1 else results[0]


def _prove_together(cases: Sequence[Case], found: Findings, proofs: Proofs) -> None:
    """Prove the splits that the planner chooses at first, in one process; `_covered` proves what follows a refusal."""
    from toolkit.runtime.proofs.split_proof import prove_all

    splits: dict[Axes, Model] = {}
    for case in cases:
        with contextlib.suppress(BadInput):
            resolved = resolve(_recipe(found, case), proofs=proofs)
            if resolved.decision.chosen is not None and (axes := Axes.of(resolved.chosen.plan)).split:
                splits[axes] = resolved.recipe.model
    if not splits:
        return
    section = next(iter(splits.values()))
    verdicts = _call(prove_all, section, list(splits))
    for axes, verdict in zip(splits, verdicts, strict=True) if isinstance(verdicts, list) else ():
        proofs.put(raw_config(section), section, axes, verdict)


def _covered(case: Case, found: Findings, proofs: Proofs) -> Result:
    """Plan a case with the recipe that a user would write, prove its split, and compare it with one process."""
    from toolkit.runtime.proofs import coverage

    expected = found.adapted if case.lora else found.expected
    if expected is None:
        return coverage.Result(status="refused", reason=found.why_not_adapted)
    train = coverage.settings(lora=case.lora)
    try:
        resolved = _planned(_recipe(found, case), proofs)
    except BadInput as error:
        return coverage.Result(status="refused", reason="; ".join(map(str, error.problems)))
    if resolved.decision.chosen is None:
        return coverage.Result(status="refused", reason=_why_refused(resolved.decision))
    plan, section = resolved.chosen.plan, resolved.recipe.model
    results = _call(coverage.run_plan, section, plan, train, resolved.deepspeed, nproc=plan.devices)
    return coverage.judge(section, train, expected, results)


def _recipe(found: Findings, case: Case) -> Recipe:
    """Return the recipe that a user would write for a case."""
    from toolkit.runtime.proofs.coverage import ADAPTERS, TOKENS, settings

    train = settings(lora=case.lora)
    adapters = {"lora": {"rank": ADAPTERS.rank, "alpha": ADAPTERS.alpha}} if case.lora else {}
    return make_recipe(
        {
            "name": "coverage",
            "model": {"config": found.section.config, "precision": found.section.precision, **adapters},
            "data": {"path": "synthetic", "tokenizer": "bytes", "seq_len": TOKENS},
            "train": {"global_batch": train.global_batch, "steps": train.steps, "lr": train.lr},
            "strategy": {**case.strategy, "recompute": "none"},
            "cluster": {"device": "cpu", "devices_per_node": case.nproc},
        }
    )


def _planned(recipe: Recipe, proofs: Proofs) -> Resolved:
    """Return the plan of a case after its proof; a wrong split becomes a refusal, or a plan with complete residuals."""
    plan = partial(resolve, recipe, proofs=proofs)
    return proven(plan(), plan, lambda axes: _verdict(recipe.model, axes), lambda line: None, proofs)


def _verdict(section: Model, axes: Axes) -> Verdict:
    from toolkit.runtime.proofs.split_proof import prove

    found = _call(prove, section, axes)
    return found if isinstance(found, Verdict) else Verdict(False, f"the split could not be proven: {found.reason}")


def stored_rows(path: Path | None, seed: int) -> CoverageRows:
    """Return the rows of a file that have this seed; of several rows of a type, the last."""
    from toolkit.runtime.proofs.coverage import Result

    if path is None or not path.exists():
        return {}
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {
        line["type"]: Row(line.get("sizes", ""), {case: Result(**result) for case, result in line["cases"].items()})
        for line in lines
        if line.get("seed", seed) == seed
    }


def _append(path: Path | None, name: str, seed: int, row: Row) -> None:
    if path is not None:
        cases = {case: asdict(result) for case, result in row.results.items()}
        line = {"type": name, "seed": seed, "code": _code_version(), "sizes": row.sizes, "cases": cases}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@functools.cache
def _code_version() -> str:
    """Return a digest of the toolkit's own code, which tells rows of different versions apart."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]
