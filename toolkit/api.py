"""Python functions for notebooks and scripts: the same planning, workers and files as on the command line."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from toolkit.errors import BadInput, LossNotFinite, Preempted, RankFailed, ToolkitError
from toolkit.launching import environment
from toolkit.plans.plan import Plan
from toolkit.recipe.file import as_mapping, dump_recipe, load_recipe, make_recipe
from toolkit.recipe.schedules import make_schedule
from toolkit.recipe.sections import Recipe, Train
from toolkit.reports import plan_page
from toolkit.reports.curves import LiveCurve, in_notebook
from toolkit.reports.tables import show_decision
from toolkit.resources import find_recipe
from toolkit.run_dir import heartbeat
from toolkit.run_dir.layout import RunDir, new_run_path, newest
from toolkit.sessions.advice import advise
from toolkit.sessions.hosts import LaunchOptions
from toolkit.sessions.parity import compare, parity_json, reference
from toolkit.sessions.preflight import check
from toolkit.sessions.prepare import Consent, prepare_resume, prepare_training
from toolkit.sessions.rehearse import Rehearsal
from toolkit.sessions.rehearse import rehearse as rehearse_plan
from toolkit.sessions.resolve import Resolved, resolve
from toolkit.sessions.start import start
from toolkit.sessions.tiny_recipe import tiny_recipe

environment.enter_processor_environment()  # on import: a notebook may compute with a model right after it

RecipeLike = str | Path | Mapping[str, Any]
"""A recipe file, the name of a shipped recipe, or a mapping."""


@dataclass(frozen=True)
class Planned:
    """A planned recipe. In a notebook cell it is shown as the table of ranked plans."""

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
        """Return what `toolkit plan --json` prints."""
        return self.resolved.decision.to_json()

    def advice(self) -> str:
        """Return the single change that would help most, in words; empty if nothing helps."""
        resolved = self.resolved
        return str(advise(resolved.recipe, resolved.job, resolved.decision) or "")

    def write_html(self, path: str | Path) -> None:
        """Write the page of `toolkit plan --html`: all plans with memory, time and refusals."""
        resolved = self.resolved
        page = plan_page.render(resolved.decision, resolved.job, dump_recipe(resolved.recipe))
        Path(path).write_text(page, encoding="utf-8")

    def __repr__(self) -> str:
        console = Console(record=True, width=110, file=io.StringIO(), force_jupyter=False)
        show_decision(self.resolved.decision, console)
        return console.export_text()


@dataclass(frozen=True)
class Run:
    """A finished run."""

    path: Path

    @property
    def metrics(self) -> Any:
        """One row per step: a pandas DataFrame if pandas is installed, else a list of dicts."""
        rows = [json.loads(line) for line in RunDir(self.path).metrics.read_text(encoding="utf-8").splitlines()]
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of summary.json: how the run ended."""
        return dict(json.loads(RunDir(self.path).summary.read_text(encoding="utf-8")))

    def model(self) -> Any:
        """Load the trained Hugging Face model, with the head of the run's task, from the newest checkpoint."""
        from toolkit.runtime.checkpoint.export import export
        from toolkit.runtime.models.build import BUILDERS

        checkpoint = newest(self.path)
        out = self.path / "model" / checkpoint.name
        if not (out / "config.json").exists():
            export(checkpoint, out, merge=True)
        task = load_recipe(checkpoint / "recipe.yaml").model.task
        return BUILDERS[task].from_pretrained(out)

    def sample(self, prompt: str, *, tokens: int = 128, temperature: float = 0.8, seed: int = 0) -> str:
        """Generate text after a prompt from the newest checkpoint, as `toolkit sample` does."""
        from toolkit.runtime.generate_text import sample

        return sample(newest(self.path), prompt, tokens=tokens, temperature=temperature, seed=seed)

    def report(self) -> None:
        """Print the report of `toolkit report`: curves, parts of a step, memory, predictions."""
        from toolkit.reports.reader import read_run
        from toolkit.reports.terminal import show

        show([read_run(self.path)], Console())


def plan(recipe: RecipeLike, *overrides: str, nproc: int | None = None, tiny: bool = False) -> Planned:
    """Rank every plan for a recipe; with `tiny`, for a tiny model of its kind on this machine."""
    return Planned(resolve(_read(recipe, overrides, tiny=tiny), nproc))


def train(
    recipe: RecipeLike,
    *overrides: str,
    nproc: int | None = None,
    run_dir: str | Path | None = None,
    tiny: bool = False,
) -> Run:
    """Train in real worker processes; a notebook cell shows the loss curve. An interrupt ends every worker.

    With `tiny`, a tiny model of the recipe's kind is trained for a few steps: does the recipe work at all?
    """
    checked = _read(recipe, overrides, tiny=tiny)
    resolved = prepare_training(checked, nproc, LaunchOptions(), print, prove_splits=False)
    path = Path(run_dir) if run_dir else new_run_path(resolved.recipe.output, resolved.recipe.name)
    return _run(resolved, path, LaunchOptions())


def resume(
    run_dir: str | Path,
    *overrides: str,
    nproc: int | None = None,
    trust_remote_code: bool = False,
    allow_sinks: bool = False,
) -> Run:
    """Resume a run from its newest checkpoint, under the same or another strategy and world size.

    `trust_remote_code` and `allow_sinks` let code run that the recipe of the run directory names: see docs/security.md.
    """
    path, options = Path(run_dir), LaunchOptions(resuming=True)
    consent = Consent(trust_remote_code=trust_remote_code, allow_sinks=allow_sinks)
    return _run(prepare_resume(path, overrides, nproc, options, print, consent, here=nproc is not None), path, options)


def parity(
    recipe: RecipeLike, *overrides: str, nproc: int = 2, strategies: str = "all", steps: int = 10
) -> dict[str, Any]:
    """Compare the recipe under each strategy with one process. Returns what `toolkit parity --json` prints."""
    checked = check(_read(recipe, overrides), environment.environment(), print)
    expected = reference(checked, steps)
    return parity_json(steps, expected, compare(checked, steps, nproc, strategies, expected))


def rehearse(recipe: RecipeLike, *overrides: str, nproc: int | None = None, ranks: str = "roles") -> Rehearsal:
    """Run ranks of the chosen plan on fake tensors: memory, collectives and host syncs, without the cluster."""
    return rehearse_plan(resolve(_read(recipe, overrides), nproc), ranks)


def training_arguments(planned: Planned, output_dir: str, kind: Any = None, **options: Any) -> Any:
    """Return a plan as `transformers.TrainingArguments`, or with `kind=trl.SFTConfig` for TRL's SFTTrainer."""
    on_cpu = _prepare_devices(planned)
    given = _trainer_keywords(planned.plan, planned.resolved.recipe.train, planned.deepspeed, on_cpu=on_cpu)
    if kind is None:
        from transformers import TrainingArguments

        kind = TrainingArguments
    return kind(**{"output_dir": output_dir, **given, **options})


def deepspeed_plugin(planned: Planned) -> Any:
    """Return a plan as `accelerate.DeepSpeedPlugin`, for a training loop of your own."""
    from accelerate import DeepSpeedPlugin

    _check_expressible(planned.plan, planned.resolved.recipe.train)
    _prepare_devices(planned)
    return DeepSpeedPlugin(hf_ds_config=dict(planned.deepspeed), zero3_init_flag=False)


def _prepare_devices(planned: Planned) -> bool:
    """Return whether training runs on the CPU; if so, skip a kernel build that only inference needs."""
    on_cpu = planned.resolved.job.cluster.device.backend == "cpu"
    if on_cpu:
        from toolkit.runtime.distributed.process_group import skip_inference_build

        skip_inference_build()
    return on_cpu


def _check_expressible(plan: Plan, train: Train) -> None:
    """Raise `BadInput` for what other trainers can't do, or would do with another loss."""
    axes = {"pp": plan.pp, "tp": plan.tp, "sp": plan.sp, "cp": plan.cp, "ep": plan.ep, "islands": plan.islands}
    split = [f"{axis} {size}" for axis, size in axes.items() if size > 1]
    if split:
        what = f"{', '.join(split)} is supported by toolkit.train only; use that, or set strategy.name=zero"
        raise BadInput("plan", what)
    if train.grad_reduce != "mean":
        raise BadInput("train.grad_reduce", f"{train.grad_reduce!r} given; other trainers average gradients; use mean")
    if train.reduce.algorithm != "auto" or (train.reduce.bucket_elements and plan.zero_stage == 0):
        what = "algorithm, and bucket_elements under ZeRO 0, are supported by toolkit.train only; remove them"
        raise BadInput("train.reduce", what)
    if train.batch_ramp is not None:
        what = "is supported by toolkit.train only; other trainers have a constant batch size: remove it"
        raise BadInput("train.batch_ramp", what)
    if train.weight_decay and train.decay != "all":
        text = "with a DeepSpeed config, other trainers decay norms and biases, too; train.decay=all is exact"
        warnings.warn(text, stacklevel=5)
    if train.lr_multipliers:
        raise BadInput("train.lr_multipliers", "are supported by toolkit.train only; remove them")
    if train.optimizer in ("lars", "muon", "adopt", "schedule_free", "onebit_adam"):
        what = f"{train.optimizer!r} is supported by toolkit.train only; use lamb or adamw with other trainers"
        raise BadInput("train.optimizer", what)


def _trainer_keywords(plan: Plan, train: Train, deepspeed: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """Return the keywords of `TrainingArguments` that give the same updates."""
    _check_expressible(plan, train)
    if plan.recompute in ("selective", "offload"):
        text = f"other trainers recompute complete layers: recompute {plan.recompute} of the plan becomes full"
        warnings.warn(text, stacklevel=3)
    optimizer = deepspeed["optimizer"]["params"]
    given: dict[str, Any] = {
        "deepspeed": dict(deepspeed),
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.grad_accum,
        "learning_rate": optimizer["lr"],
        "max_grad_norm": train.grad_clip,
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
        "gradient_checkpointing": plan.recompute != "none",
        "max_steps": train.steps or -1,
        "seed": train.seed,
        "use_cpu": on_cpu,
        "report_to": [],
        "weight_decay": train.weight_decay,
        **_schedule(train, optimizer["lr"]),
    }
    if train.epochs is not None:
        given["num_train_epochs"] = train.epochs
    if "betas" in optimizer:
        given |= {"adam_beta1": train.betas[0], "adam_beta2": train.betas[1]}
    if "eps" in optimizer:
        given["adam_epsilon"] = train.eps
    return given


def _schedule(train: Train, lr: float) -> dict[str, Any]:
    """Return our schedule by transformers' names; exact except for the warm-up, which transformers starts at 0."""
    warmup: float = train.warmup
    if train.steps is not None:
        warmup = make_schedule(train, train.steps).warmup_steps
    if warmup:
        text = "transformers starts the warm-up at 0, one step later than toolkit.train; train.warmup=0 is exact"
        warnings.warn(text, stacklevel=4)
    kinds: dict[str, tuple[str, dict[str, float]]] = {
        "constant": ("constant_with_warmup", {}),
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": train.min_lr_ratio}),
        "linear": ("polynomial", {"lr_end": train.min_lr_ratio * lr, "power": 1.0}),
    }
    if train.schedule not in kinds:
        what = f"{train.schedule!r} is supported by toolkit.train only; use {', '.join(kinds)} with other trainers"
        raise BadInput("train.schedule", what)
    name, options = kinds[train.schedule]
    return {"lr_scheduler_type": name, "lr_scheduler_kwargs": options, "warmup_steps": warmup}


def _read(recipe: RecipeLike, overrides: tuple[str, ...], *, tiny: bool = False) -> Recipe:
    if tiny:
        return make_recipe(as_mapping(tiny_recipe(_read(recipe, ()))), overrides)
    if isinstance(recipe, Mapping):
        return make_recipe(dict(recipe), overrides)
    return load_recipe(find_recipe(str(recipe)), overrides)


def _run(resolved: Resolved, path: Path, options: LaunchOptions) -> Run:
    """Run to the end. In a notebook the workers' console output is off, and the loss curve is drawn instead."""
    if in_notebook():
        recipe = resolved.recipe
        resolved = replace(resolved, recipe=replace(recipe, metrics=replace(recipe.metrics, console=False)))
    console = Console(file=io.StringIO(), force_jupyter=False) if in_notebook() else Console()
    with LiveCurve(RunDir(path).metrics, resolved.recipe.train.steps):
        code = start(resolved, path, options, console)
    if code:
        raise _failure(code, path)
    return Run(path)


def _failure(code: int, path: Path) -> ToolkitError:
    """Return the exception for an exit code, with the error that the workers wrote into their last heartbeats."""
    run = RunDir(path)
    beats = heartbeat.read_all(run.heartbeats).values()
    reported = [beat.error for beat in beats if beat.exit_code == code and beat.error]
    text = f"{reported[0] if reported else f'the run ended with exit code {code}'}\nlogs: {run.log(0).parent}"
    kind = next((kind for kind in (LossNotFinite, Preempted) if kind.exit_code == code), RankFailed)
    error = kind(text)
    error.exit_code = code
    return error
