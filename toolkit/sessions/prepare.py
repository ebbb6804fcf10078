"""Plan a run before it starts: a new one, a resumed one, or one that launch files start."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.checkpoints.format import file_problems
from toolkit.checkpoints.store import path_of, steps
from toolkit.clusters.reader import check_here
from toolkit.errors import BadInput, Problem
from toolkit.launching import environment
from toolkit.launching.launch_files import IMAGE, Emission, files, fixed_recipe
from toolkit.recipe.file import as_mapping, load_recipe
from toolkit.recipe.sections import ClusterSection, Recipe
from toolkit.run_dir.async_islands import goes_async
from toolkit.run_dir.layout import RunDir
from toolkit.sessions import ray
from toolkit.sessions.hosts import LaunchOptions, check_launcher, on_hosts
from toolkit.sessions.preflight import check, prove
from toolkit.sessions.rehearsal_verdict import rehearsed
from toolkit.sessions.resolve import Resolved, proven, resolve


def prepare_training(
    recipe: Recipe,
    nproc: int | None,
    options: LaunchOptions,
    report: Callable[[str], object],
    *,
    prove_splits: bool,
    rehearses: bool = False,
) -> Resolved:
    """Check a recipe and plan it for the hosts it will run on.

    `prove_splits`: check the chosen tensor or pipeline split on a tiny model first, if no earlier run has.
    `rehearses`: refuse plans that do not fit in rehearsal.
    """
    env = environment.environment()
    recipe = on_hosts(check(recipe, env, report), options.hosts)
    if options.launcher == ray.LAUNCHER:
        recipe = ray.on_ray(recipe, nproc, options.hosts)
    resolved = resolve(recipe, nproc)
    if resolved.decision.chosen is not None:
        check_launcher(options.launcher, resolved.chosen.plan)
    if not prove_splits:
        return resolved
    if resolved.decision.chosen is not None and _runs_here(resolved, options):
        check_here(resolved.job.cluster)  # before the minute that a proof and a rehearsal may take
    resolved = proven(resolved, lambda: resolve(recipe, nproc), lambda axes: prove(recipe.model, axes, env), report)
    return rehearsed(resolved, report) if rehearses else resolved


def _runs_here(resolved: Resolved, options: LaunchOptions) -> bool:
    """Whether this host runs all workers; an asynchronous island checks its own share of the cluster."""
    elsewhere = options.hosts or options.launcher == ray.LAUNCHER
    return not elsewhere and not goes_async(resolved.recipe, resolved.chosen.plan)


@dataclass(frozen=True, kw_only=True)
class Consent:
    """Code named by the recipe of a run directory that the user lets run."""

    trust_remote_code: bool = False
    """Python code that comes with the model (`model.trust_remote_code`)."""
    allow_sinks: bool = False
    """Modules in `metrics.sinks`, although other users could have written the recipe."""


def prepare_resume(
    run_dir: Path,
    overrides: Sequence[str],
    nproc: int | None,
    options: LaunchOptions,
    report: Callable[[str], object],
    consent: Consent,
    *,
    here: bool,
) -> Resolved:
    """Plan the recipe of a run directory again, with overrides, for the processes that are available now.

    `here`: the user has asked for so many processes on this host, whatever hosts the run had before.
    """
    run = RunDir(run_dir)
    if not run.recipe.is_file():
        raise BadInput(str(run_dir), "is not a run directory (no recipe.yaml); give one that `toolkit train` made")
    recipe = load_recipe(run.recipe, ["checkpoint.resume=auto", *overrides])
    _check_consent(run, recipe, overrides, consent, report)
    for line in edited_keys(run, overrides):
        report(line)
    recipe = check(recipe, environment.environment(), report)
    if options.hosts:
        recipe, nproc = on_hosts(replace(recipe, cluster="auto"), options.hosts), None
    typed = any(override.startswith("cluster") for override in overrides)
    several = isinstance(recipe.cluster, ClusterSection) and recipe.cluster.nodes > 1
    if here and several and not options.hosts and not typed:
        report(f"cluster: several nodes before; now {nproc} processes on this host")
        recipe = replace(recipe, cluster="auto")
    if options.launcher == ray.LAUNCHER:
        if not typed:
            recipe = replace(recipe, cluster="auto")
        recipe = ray.on_ray(recipe, nproc, options.hosts)
    if recipe.checkpoint.resume != "auto":
        what = (
            f"{recipe.checkpoint.resume!r} given; `toolkit resume` continues from the run's own checkpoints: use auto"
        )
        raise BadInput("checkpoint.resume", what)
    return resolve(recipe, nproc)


def _check_consent(
    run: RunDir, recipe: Recipe, overrides: Sequence[str], consent: Consent, report: Callable[[str], object]
) -> None:
    """Raise `BadInput` if the recipe of a run directory would run code that the user has not asked for."""
    problems = []
    typed = [override.partition("=")[0].strip() for override in overrides]
    if recipe.model.trust_remote_code and not consent.trust_remote_code and "model.trust_remote_code" not in typed:
        what = f"true in {run.recipe}: Python code of the model would run here; if you trust it, add "
        problems.append(Problem("model.trust_remote_code", f"{what}--trust-remote-code"))
    sinks = [] if "metrics.sinks" in typed else recipe.metrics.sinks
    others = _writable_by_others(run)
    if sinks and others and not consent.allow_sinks:
        what = f"{', '.join(sinks)} in {run.recipe}: this code would run here, and {others}; if you trust it, add "
        problems.append(Problem("metrics.sinks", f"{what}--allow-sinks"))
    if problems:
        raise BadInput(str(run.path), problems)
    if sinks:
        report(f"metrics.sinks of {run.recipe} is code that will run: {', '.join(sinks)}")


def _writable_by_others(run: RunDir) -> str:
    """Say who else may have written the recipe of a run directory; empty if only this user (or root) may have."""
    for path in (run.path, run.recipe):
        found = path.stat()
        if found.st_uid not in (os.getuid(), 0):
            return f"{path} belongs to another user (uid {found.st_uid})"
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            return f"other users can write to {path}"
    return ""


def edited_keys(run: RunDir, overrides: Sequence[str]) -> list[str]:
    """Return a line for each key of recipe.yaml that differs from the copy in the newest checkpoint.

    The checkpoint's copy has a checksum, the file in the run directory does not. Keys that are overridden on the
    command line are meant to differ.
    """
    from toolkit.reports.figures import flatten

    found = steps(run.checkpoints)
    copy = path_of(run.checkpoints, found[0]) / "recipe.yaml" if found else None
    if copy is None or not copy.is_file() or file_problems(copy.parent, [copy.name]):
        return []  # a damaged checkpoint is reported when it is loaded
    then, now = flatten(as_mapping(load_recipe(copy))), flatten(as_mapping(load_recipe(run.recipe)))
    given = [override.partition("=")[0] for override in overrides]
    keys = [
        key
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
        and key != "checkpoint.resume"
        and not any(key == one or key.startswith(f"{one}.") for one in given)
    ]
    return [
        f"{run.recipe}: {key} is {now.get(key)!r}; the checkpoint was made with {then.get(key)!r}; "
        f"the run continues with {now.get(key)!r}"
        for key in keys
    ]


def previous_num_devices(run_dir: Path) -> int | None:
    """Return the number of processes in the last plan of a run; None if its plan.json can't be read."""
    try:
        plan = json.loads(RunDir(run_dir).plan.read_text(encoding="utf-8"))
        return int(plan["islands"] * plan["dp"] * plan["tp"] * plan["pp"] * plan["sp"] * plan.get("cp", 1))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def emit(resolved: Resolved, target: str, out: Path, *, image: str = IMAGE, rehearsal: str | None = None) -> None:
    """Write the launch files of a plan for a launcher; raise `BadInput` if the directory already has some.

    `rehearsal`: the verdict of a rehearsal, which plan.json notes.
    """
    plan, cluster = resolved.chosen.plan, resolved.job.cluster
    if target == "accelerate" and plan.pp > 1:
        raise BadInput(
            "--for",
            "accelerate does not support pipeline parallelism; use --for deepspeed or torchrun, or set strategy.pp=1",
        )
    emission = Emission(
        recipe=fixed_recipe(resolved.recipe, plan, cluster),
        plan={**resolved.plan_json(), "rehearsal": rehearsal},
        deepspeed=resolved.deepspeed,
        cluster=cluster,
        image=image,
    )
    _write(out, files(target, emission))


def _write(out: Path, contents: dict[str, str]) -> None:
    present = [name for name in contents if (out / name).exists()]
    if present:
        raise BadInput("--out", f"{out} already contains {present[0]}; choose another directory, or remove it")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (out / name).write_text(text, encoding="utf-8")
            (out / name).chmod(0o755 if name == "launch.sh" else 0o644)
    except OSError as error:
        raise BadInput("--out", f"{out} can't be written: {error.strerror}") from None
