"""The run directory: the only border between planning and running."""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from toolkit.checkpoints import store
from toolkit.checkpoints.format import MANIFEST
from toolkit.errors import BadInput
from toolkit.plans.plan import Plan
from toolkit.recipe.file import dump_recipe, load_recipe
from toolkit.recipe.sections import Recipe


@dataclass(frozen=True)
class RunDir:
    """Paths of one run."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The effective recipe."""
        return self.path / "recipe.yaml"

    @property
    def plan(self) -> Path:
        """The chosen plan with its estimate."""
        return self.path / "plan.json"

    @property
    def deepspeed(self) -> Path:
        """The DeepSpeed config."""
        return self.path / "deepspeed.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """One JSON object an evaluation."""
        return self.path / "eval.jsonl"

    @property
    def summary(self) -> Path:
        """How the run ended."""
        return self.path / "summary.json"

    @property
    def events(self) -> Path:
        """What happened besides steps: starts, checkpoints, stragglers; one JSON object each."""
        return self.path / "events.jsonl"

    @property
    def trace(self) -> Path:
        """Profiler traces, if the recipe asks for them."""
        return self.path / "trace"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints, one directory each."""
        return self.path / "checkpoints"

    @property
    def heartbeats(self) -> Path:
        """What each rank is doing, one file each."""
        return self.path / "heartbeats"

    def island(self, number: int) -> RunDir:
        """The run of one island, where islands do not wait for one another."""
        return RunDir(self.path / "islands" / str(number))

    def log(self, rank: int) -> Path:
        """Everything that a rank printed."""
        return self.path / "logs" / f"rank-{rank}.log"


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What a worker is told: the contents of a run directory."""

    recipe: Recipe
    plan: Plan
    deepspeed: dict[str, Any]
    predicted_step_seconds: float
    predicted_memory_bytes: int
    predicted_memory: dict[str, int]
    """The same by part."""
    model_flops: float
    """FLOPs of a step by convention (no recompute): the base of MFU."""
    peak_flops: float
    """Peak of one device."""
    hardware_flops: float
    """FLOPs of a step with what is computed again: the base of HFU."""
    predicted_parts: dict[str, float]
    """Seconds a step by part, as predicted."""
    memory_limit_bytes: int
    """What the device has for the job; 0: unknown."""
    link_bytes_per_second: float
    """Of one rank, over the slowest link that its gradients take; 0: unknown."""


def new_run_path(output: str, name: str) -> Path:
    """A fresh path `output/name-time`."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path = Path(output) / f"{name}-{stamp}"
    for number in range(2, 1000):
        if not path.exists():
            break
        path = Path(output) / f"{name}-{stamp}-{number}"
    return path


def create(path: Path) -> RunDir:
    """Make the directory; `BadInput` if something is there already."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise BadInput(
            "--run-dir",
            f"{path} already exists and is not empty; choose another, or go on with it: toolkit resume {path}",
        )
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput("output", f"{path} can't be made: {error.strerror}") from None
    return RunDir(path)


def can_resume(path: Path, resume: str, every: int) -> bool:
    """Whether a run is there that `checkpoint.resume` lets continue: it has checkpoints, or was about to write some."""
    run = RunDir(path)
    is_run = run.recipe.is_file() and run.plan.is_file()
    return resume == "auto" and is_run and bool(every or store.steps(run.checkpoints))


def write(run: RunDir, recipe: Recipe, plan: dict[str, Any], deepspeed: dict[str, Any]) -> None:
    """Put the three files of the border into the directory."""
    texts = {
        run.recipe: dump_recipe(recipe),
        run.plan: json.dumps(plan, indent=2) + "\n",
        run.deepspeed: json.dumps(deepspeed, indent=2) + "\n",
    }
    for path, text in texts.items():
        temporary = path.with_name(f".{path.name}.tmp")  # a run that goes on has one order or the other, never half
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)


def read(run: RunDir) -> RunSpec:
    """What the three files say."""
    try:
        return _order(run)
    except BadInput:
        raise
    except (OSError, ValueError) as error:
        raise BadInput(str(run.path), f"not a run directory: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise BadInput(str(run.plan), "is not a plan of this toolkit; plan again with `toolkit train`") from None


def _order(run: RunDir) -> RunSpec:
    plan = json.loads(run.plan.read_text(encoding="utf-8"))
    deepspeed = json.loads(run.deepspeed.read_text(encoding="utf-8"))
    # Axes that came later have defaults: run directories of earlier versions go on.
    axes = {f.name: plan[f.name] for f in fields(Plan) if f.name in plan or f.default is MISSING}
    return RunSpec(
        recipe=load_recipe(run.recipe),
        plan=Plan(**axes | {"pipeline_bounds": tuple(plan["pipeline_bounds"])}),
        deepspeed=deepspeed,
        predicted_step_seconds=plan["time"]["total"],
        predicted_memory_bytes=plan["memory"]["total"],
        predicted_memory={name: size for name, size in plan["memory"].items() if name != "total"},
        model_flops=plan["model_flops"],
        peak_flops=plan["peak_flops"],
        hardware_flops=plan.get("hardware_flops", plan["model_flops"]),
        predicted_parts={name: seconds for name, seconds in plan["time"].items() if name != "total"},
        memory_limit_bytes=plan.get("memory_limit_bytes", 0),
        link_bytes_per_second=plan.get("link_bytes_per_second", 0.0),
    )


def newest(given: Path) -> Path:
    """A checkpoint's own path, or the newest of a run directory."""
    if (given / MANIFEST).is_file():
        return given
    for root in (RunDir(given).checkpoints, given):
        found = store.steps(root)
        if found:
            return store.path_of(root, found[0])
    raise BadInput(str(given), "holds no checkpoint; give a checkpoint or a run directory that has some")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing, damaged or contains anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
