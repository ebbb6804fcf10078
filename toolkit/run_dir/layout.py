"""Layout of a run directory, the only interface between planning and running."""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from toolkit.checkpoints import store
from toolkit.checkpoints.format import MANIFEST, content_problems, file_problems, read_manifest
from toolkit.errors import BadInput, Problem
from toolkit.plans.plan import Plan
from toolkit.recipe.file import dump_recipe, load_recipe
from toolkit.recipe.sections import Recipe

TAIL_LINES = 15
LOCK = "lock.json"
"""Says which process runs in the directory."""


@dataclass(frozen=True)
class RunDir:
    """Paths inside one run directory."""

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
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """One JSON object per evaluation."""
        return self.path / "eval.jsonl"

    @property
    def summary(self) -> Path:
        """How the run ended."""
        return self.path / "summary.json"

    @property
    def events(self) -> Path:
        """Events other than steps (starts, checkpoints, stragglers), one JSON object each."""
        return self.path / "events.jsonl"

    @property
    def trace(self) -> Path:
        """Profiler traces, if the recipe enables them."""
        return self.path / "trace"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints, one directory each."""
        return self.path / "checkpoints"

    @property
    def heartbeats(self) -> Path:
        """Heartbeats, one file per rank."""
        return self.path / "heartbeats"

    def island(self, number: int) -> RunDir:
        """The run directory of one asynchronous island."""
        return RunDir(self.path / "islands" / str(number))

    def log(self, rank: int) -> Path:
        """Output of one rank."""
        return self.path / "logs" / f"rank-{rank}.log"


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What a worker needs to run, read from the run directory."""

    recipe: Recipe
    plan: Plan
    deepspeed: dict[str, Any]
    predicted_step_seconds: float
    predicted_memory_bytes: int
    predicted_memory: dict[str, int]
    """Predicted bytes per device by part of memory."""
    model_flops: float
    """FLOPs per step that the model needs, without recompute: the base of MFU."""
    peak_flops: float
    """Peak FLOPs per second of one device."""
    hardware_flops: float
    """FLOPs per step including recompute: the base of HFU."""
    predicted_parts: dict[str, float]
    """Predicted seconds per step by part."""
    memory_limit_bytes: int
    """Device memory available to the job; 0: unknown."""
    link_bytes_per_second: float
    """Bandwidth of one rank over the slowest link that its gradients cross; 0: unknown."""


def new_run_path(output: str, name: str) -> Path:
    """A path `output/name-time` that does not exist yet."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path = Path(output) / f"{name}-{stamp}"
    for number in range(2, 1000):
        if not path.exists():
            break
        path = Path(output) / f"{name}-{stamp}-{number}"
    return path


def make_private(path: Path) -> None:
    """Make a run directory that only its owner can enter, whatever the umask is; one that exists stays as it is.

    Logs, metrics and checkpoints may hold data.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def check_free(path: Path) -> None:
    """Raise `BadInput` if the directory exists and is not empty."""
    if path.exists() and (not path.is_dir() or any(not each.name.startswith(LOCK) for each in path.iterdir())):
        raise BadInput(
            "--run-dir",
            f"{path} already exists and is not empty; choose another, or resume it: toolkit resume {path}",
        )


def create(path: Path) -> RunDir:
    """Create the directory; raises `BadInput` if it exists and is not empty."""
    check_free(path)
    try:
        make_private(path)
        (path / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise BadInput("output", f"{path} can't be created: {error.strerror}") from None
    return RunDir(path)


def can_resume(path: Path, resume: str, every: int) -> bool:
    """Whether the path has a run that `checkpoint.resume` lets resume: it has checkpoints, or would write some."""
    run = RunDir(path)
    is_run = run.recipe.is_file() and run.plan.is_file()
    return resume == "auto" and is_run and bool(every or store.steps(run.checkpoints))


def write(run: RunDir, recipe: Recipe, plan: dict[str, Any], deepspeed: dict[str, Any]) -> None:
    """Write the recipe, the plan and the DeepSpeed config into the directory."""
    texts = {
        run.recipe: dump_recipe(recipe),
        run.plan: json.dumps(plan, indent=2) + "\n",
        run.deepspeed: json.dumps(deepspeed, indent=2) + "\n",
    }
    for path, text in texts.items():
        # Replaced atomically: a resumed run sees the old file or the new one, never half of it.
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            error.filename = str(path)  # an error of writing, unlike one of opening, names no file
            raise
        os.replace(temporary, path)


def read(run: RunDir) -> RunSpec:
    """Read a run directory; raises `BadInput` if it is not one."""
    try:
        return _read_spec(run)
    except BadInput:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(str(run.path), f"not a run directory: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise BadInput(str(run.plan), "is not a plan of this toolkit; plan again with `toolkit train`") from None


def _read_spec(run: RunDir) -> RunSpec:
    plan = json.loads(run.plan.read_text(encoding="utf-8"))
    deepspeed = json.loads(run.deepspeed.read_text(encoding="utf-8"))
    # Axes added in later versions have defaults, so run directories of earlier versions can be resumed.
    axes = {f.name: plan[f.name] for f in fields(Plan) if f.name in plan or f.default is MISSING}
    axes["pipeline_bounds"] = tuple(plan["pipeline_bounds"])
    usual = {f.name: "" if f.default is MISSING else f.default for f in fields(Plan)}
    if any(type(value) is not type(usual[name]) for name, value in axes.items()) or not isinstance(deepspeed, dict):
        raise TypeError
    if any(type(bound) is not int for bound in axes["pipeline_bounds"]):
        raise TypeError
    if not all(value.isprintable() for value in axes.values() if isinstance(value, str)):
        raise TypeError
    seconds = {name: _number(value) for name, value in plan["time"].items()}
    memory = {name: int(_number(value)) for name, value in plan["memory"].items()}
    return RunSpec(
        recipe=load_recipe(run.recipe),
        plan=Plan(**axes),
        deepspeed=deepspeed,
        predicted_step_seconds=seconds.pop("total"),
        predicted_memory_bytes=memory.pop("total"),
        predicted_memory=memory,
        model_flops=_number(plan["model_flops"]),
        peak_flops=_number(plan["peak_flops"]),
        hardware_flops=_number(plan.get("hardware_flops", plan["model_flops"])),
        predicted_parts=seconds,
        memory_limit_bytes=int(_number(plan.get("memory_limit_bytes", 0))),
        link_bytes_per_second=_number(plan.get("link_bytes_per_second", 0.0)),
    )


def _number(value: Any) -> float:
    """A finite number of a plan; raises `TypeError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise TypeError
    return value


def best(given: Path, place: int = 1) -> Path:
    """The checkpoint of a run directory with the lowest loss of an evaluation, or the one at another place among the
    best; `BadInput` if none is marked."""
    for root in (RunDir(given).checkpoints, given):
        found = store.all_best(root)
        if len(found) >= place:
            return store.path_of(root, found[place - 1])
        if found:
            what = f"{place} given; {len(found)} are kept (checkpoint.keep_best), so 1 to {len(found)} can be exported"
            raise BadInput("--best", what)
    raise BadInput(str(given), "no checkpoint is marked as the best; give a run with train.eval_every and checkpoints")


def newest(given: Path) -> Path:
    """The given checkpoint, or the newest one of a run directory; raises `BadInput` if there is none."""
    if (given / MANIFEST).is_file():
        return given
    for root in (RunDir(given).checkpoints, given):
        found = store.steps(root)
        if found:
            return store.path_of(root, found[0])
    raise BadInput(str(given), "contains no checkpoint; give a checkpoint, or a run directory with checkpoints")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing, damaged or contains anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Verification:
    """What was found in one checkpoint."""

    path: Path
    problems: tuple[Problem, ...]
    """Empty: every byte is as it was written; then the numbers below are known."""
    step: int = 0
    num_files: int = 0
    size_bytes: int = 0


def verify(given: Path) -> tuple[list[Verification], list[Problem]]:
    """Verify a checkpoint, or all checkpoints of a run directory, and the pointer to the latest one.

    Returns what was found in each, and all problems with their paths.
    """
    found = [_verify_one(path) for path in _checkpoints(given)]
    problems = [
        Problem(f"{each.path.name}/{problem.where}", problem.what) for each in found for problem in each.problems
    ]
    roots = [root for root in (RunDir(given).checkpoints, given) if store.steps(root)]
    problems.extend(problem for root in roots[:1] if (problem := store.latest_problem(root)))
    return found, problems


def check(path: Path) -> list[Problem]:
    """Return every problem of one checkpoint: damaged files or, if there are none, errors in its index or state."""
    return file_problems(path) or content_problems(path)


def _verify_one(path: Path) -> Verification:
    problems = tuple(check(path))
    if problems:
        return Verification(path, problems)
    files, step = read_manifest(path)
    return Verification(path, (), step, len(files), sum(entry.bytes for entry in files.values()))


def _checkpoints(given: Path) -> list[Path]:
    if not given.is_dir():
        raise BadInput(str(given), "no such directory; give a checkpoint or a run directory")
    if (given / MANIFEST).exists():
        return [given]
    for root in (RunDir(given).checkpoints, given):
        found = store.steps(root)
        if found:
            return [store.path_of(root, step) for step in found]
    raise BadInput(str(given), f"contains no checkpoint (no {MANIFEST}, no step-… directories)")


def log_size(log: Path) -> int:
    """Size of a log in bytes."""
    return log.stat().st_size if log.exists() else 0


def log_since(log: Path, offset: int) -> str:
    """The text of a log after an offset."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(offset)
        return file.read().decode("utf-8", "replace")


def tail(log: Path) -> str:
    """The last lines of a log."""
    if not log.exists():
        return "  (no log was written)"
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 20_000))
        lines = file.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
    return "\n".join(f"  | {line}" for line in lines)
