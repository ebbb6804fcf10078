"""The notebook's side: the same planning, workers and files as on the command line, as functions."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from toolkit.errors import LossNotFinite, Preempted, RankFailed, ToolkitError
from toolkit.launching import environment, other_trainers
from toolkit.plans.plan import Plan
from toolkit.recipe.file import load_recipe, make_recipe
from toolkit.recipe.sections import Recipe
from toolkit.reports.live_curve import LiveCurve, in_notebook
from toolkit.reports.plan_table import show_decision
from toolkit.resources import find_recipe
from toolkit.run_dir import heartbeat
from toolkit.run_dir.layout import RunDir, new_run_path
from toolkit.sessions.parity import compare, reference
from toolkit.sessions.preflight import check
from toolkit.sessions.resolve import Resolved, resolve
from toolkit.sessions.start import start

RecipeLike = str | Path | Mapping[str, Any]


@dataclass(frozen=True)
class Planned:
    """A planned recipe. Shown in a cell, it is the ranked table."""

    resolved: Resolved

    @property
    def plan(self) -> Plan:
        """The chosen plan."""
        return self.resolved.chosen.plan

    @property
    def deepspeed(self) -> dict[str, Any]:
        """The DeepSpeed config of the chosen plan."""
        return self.resolved.deepspeed

    def to_json(self) -> dict[str, Any]:
        """What `toolkit plan --json` prints."""
        return self.resolved.decision.to_json()

    def __repr__(self) -> str:
        console = Console(record=True, width=110, file=io.StringIO(), force_jupyter=False)
        show_decision(self.resolved.decision, console)
        return console.export_text()


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    path: Path

    @property
    def metrics(self) -> Any:
        """One row a step: a pandas DataFrame if pandas is there, else a list of dicts."""
        rows = [json.loads(line) for line in RunDir(self.path).metrics.read_text(encoding="utf-8").splitlines()]
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    @property
    def summary(self) -> dict[str, Any]:
        """How the run ended."""
        return dict(json.loads(RunDir(self.path).summary.read_text(encoding="utf-8")))

    def model(self) -> Any:
        """The trained Hugging Face model, from the newest checkpoint."""
        from transformers import AutoModelForCausalLM

        from toolkit.run_dir.layout import newest
        from toolkit.runtime.checkpoint.export import export

        checkpoint = newest(self.path)
        out = self.path / "model" / checkpoint.name
        if not (out / "config.json").exists():
            export(checkpoint, out, merge=True)
        return AutoModelForCausalLM.from_pretrained(out)


def plan(recipe: RecipeLike, *overrides: str, nproc: int | None = None) -> Planned:
    """Rank every plan for a recipe: a path, a shipped name, or a mapping."""
    return Planned(resolve(_read(recipe, overrides), nproc))


def train(recipe: RecipeLike, *overrides: str, nproc: int | None = None, run_dir: str | Path | None = None) -> Run:
    """Train in real worker processes; the loss curve is drawn in the cell. An interrupt ends every worker."""
    checked = check(_read(recipe, overrides), environment.environment(), print)
    path = Path(run_dir) if run_dir else new_run_path(checked.output, checked.name)
    return _run(checked, path, nproc, resuming=False)


def resume(run_dir: str | Path, *overrides: str, nproc: int | None = None) -> Run:
    """Go on with a run from its newest checkpoint, under the same or another strategy and world."""
    path = Path(run_dir)
    return _run(load_recipe(RunDir(path).recipe, ["checkpoint.resume=auto", *overrides]), path, nproc, resuming=True)


def parity(
    recipe: RecipeLike, *overrides: str, nproc: int = 2, strategies: str = "all", steps: int = 10
) -> dict[str, Any]:
    """The recipe under each strategy against one process: what `toolkit parity --json` prints."""
    checked = check(_read(recipe, overrides), environment.environment(), print)
    expected = reference(checked, steps)
    outcomes = {o.name: o.to_json() for o in compare(checked, steps, nproc, strategies, expected)}
    return {"steps": steps, "reference": list(expected.loss), "strategies": outcomes}


def training_arguments(planned: Planned, output_dir: str, kind: Any = None, **options: Any) -> Any:
    """`transformers.TrainingArguments` of a plan, for Trainer; with `kind=trl.SFTConfig` for TRL's SFTTrainer."""
    on_cpu = _prepare_devices(planned)
    given = other_trainers.arguments(planned.plan, planned.resolved.recipe.train, planned.deepspeed, on_cpu=on_cpu)
    if kind is None:
        from transformers import TrainingArguments

        kind = TrainingArguments
    return kind(**{"output_dir": output_dir, **given, **options})


def deepspeed_plugin(planned: Planned) -> Any:
    """`accelerate.DeepSpeedPlugin` of a plan, for people who write their own loop."""
    from accelerate import DeepSpeedPlugin

    other_trainers.check_expressible(planned.plan, planned.resolved.recipe.train)
    _prepare_devices(planned)
    return DeepSpeedPlugin(hf_ds_config=dict(planned.deepspeed), zero3_init_flag=False)


def _prepare_devices(planned: Planned) -> bool:
    """Whether training runs on the CPU, where DeepSpeed would first compile what only inference uses."""
    on_cpu = planned.resolved.job.cluster.device.backend == "cpu"
    if on_cpu:
        from toolkit.runtime.distributed.process_group import skip_inference_build

        skip_inference_build()
    return on_cpu


def _read(recipe: RecipeLike, overrides: tuple[str, ...]) -> Recipe:
    if isinstance(recipe, Mapping):
        return make_recipe(dict(recipe), overrides)
    return load_recipe(find_recipe(str(recipe)), overrides)


def _run(recipe: Recipe, path: Path, nproc: int | None, *, resuming: bool) -> Run:
    """Workers write to their logs; what they record is drawn here."""
    if in_notebook():
        recipe = replace(recipe, metrics=replace(recipe.metrics, console=False))
    resolved = resolve(recipe, nproc)
    console = Console(file=io.StringIO(), force_jupyter=False) if in_notebook() else Console()
    with LiveCurve(RunDir(path).metrics, recipe.train.steps):
        code = start(resolved, path, "local", console, resuming=resuming)
    if code:
        raise _failure(code, path)
    return Run(path)


def _failure(code: int, path: Path) -> ToolkitError:
    """The exception for an end that the workers have told in their logs and last beats."""
    run = RunDir(path)
    told = [beat.error for beat in heartbeat.read_all(run.heartbeats).values() if beat.exit_code == code and beat.error]
    text = f"{told[0] if told else f'the run ended with exit code {code}'}\nlogs: {run.log(0).parent}"
    kind = next((kind for kind in (LossNotFinite, Preempted) if kind.exit_code == code), RankFailed)
    error = kind(text)
    error.exit_code = code
    return error
