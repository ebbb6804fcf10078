"""Checks before a process starts: data paths, missing packages, unsupported settings, W&B without an API key."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace

from toolkit.errors import BadInput, Problem
from toolkit.launching.environment import has_wandb_key
from toolkit.launching.launchers import PYTHON, import_path
from toolkit.launching.stop_signals import StopRequest, forwarded
from toolkit.plans.split_verdicts import Axes
from toolkit.recipe.data_checks import source_weights
from toolkit.recipe.data_files import data_files, image_folders
from toolkit.recipe.model_section import Lora, Model
from toolkit.recipe.sections import Recipe
from toolkit.verdicts import Verdict


def check(recipe: Recipe, env: Mapping[str, str], report: Callable[[str], object]) -> Recipe:
    """Return the recipe that will run; raise `BadInput` with every problem, report every fallback."""
    problems = [*_unavailable(recipe), *_data_problems(recipe), *_metrics_problems(recipe)]
    if problems:
        raise BadInput(recipe.name, problems)
    wandb = recipe.metrics.wandb
    if wandb.mode == "online" and not has_wandb_key(env):
        report("W&B is online in the recipe, but there is no API key (`wandb login` or WANDB_API_KEY):")
        report("recording offline instead; `wandb sync` uploads the run later")
        return replace(recipe, metrics=replace(recipe.metrics, wandb=replace(wandb, mode="offline")))
    return recipe


def prove(section: Model, axes: Axes, env: Mapping[str, str]) -> Verdict:
    """Check a split in float64 on a tiny model, in a separate CPU process so that no accelerator is touched here."""
    question = json.dumps({"model": asdict(section), "axes": asdict(axes)})
    stop, pipe = StopRequest(), subprocess.PIPE
    with forwarded(stop.record):  # raised inside `Popen`, a stop signal would leave a process that nobody knows
        process = subprocess.Popen(
            [*PYTHON, "toolkit.runtime.proofs"],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            env={**env, **import_path(), "DS_ACCELERATOR": "cpu"},
        )
    with process:
        try:
            if stop.signal is not None:
                signal.raise_signal(stop.signal)
            said, errors = process.communicate(question)
        except BaseException:
            process.kill()
            raise
    try:
        return Verdict(**json.loads(said.strip().splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        last = (errors.strip().splitlines() or ["no answer"])[-1]
        return Verdict(False, f"the split could not be checked on a tiny model: {last}")


def _unavailable(recipe: Recipe) -> Iterator[Problem]:
    """Yield settings that this version does not support, or that need a package that is not installed."""
    if recipe.data.format == "image-classification" and importlib.util.find_spec("PIL") is None:
        yield Problem("data.format", "images need Pillow; install it with: pip install 'zero-toolkit[vision]'")
    if recipe.checkpoint.every and (recipe.strategy.offload or "").startswith("nvme"):
        yield Problem(
            "checkpoint.every",
            "states on NVMe can't be saved by this version; use offload: cpu, or set it to 0",
        )
    if recipe.model.kernels == "liger" and importlib.util.find_spec("liger_kernel") is None:
        yield Problem("model.kernels", "liger needs liger-kernel: pip install liger-kernel, or use auto or none")
    if recipe.model.lora is not None:
        yield from _lora_problems(recipe, recipe.model.lora)


def _lora_problems(recipe: Recipe, lora: Lora) -> Iterator[Problem]:
    if importlib.util.find_spec("peft") is None:
        yield Problem("model.lora", "needs peft; install it with: pip install 'zero-toolkit[lora]'")
    if lora.quantize == "none":
        return
    key = "model.lora.quantize"
    if lora.dora:
        yield Problem("model.lora.dora", "4-bit weights would be unpacked for every forward pass; use one of the two")
    if importlib.util.find_spec("bitsandbytes") is None:
        yield Problem(key, "4bit needs bitsandbytes: pip install 'zero-toolkit[qlora]', or use none")
    if recipe.model.init != "pretrained":
        yield Problem(key, "4bit needs pretrained weights; a frozen random base learns nothing")
    if recipe.strategy.zero_stage == 3:
        yield Problem(key, "4bit weights can't be sharded by ZeRO 3; use zero_stage 2 or less")


def _metrics_problems(recipe: Recipe) -> Iterator[Problem]:
    metrics = recipe.metrics
    if metrics.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        yield Problem(
            "metrics.tensorboard", "needs tensorboardX; install it with: pip install 'zero-toolkit[tensorboard]'"
        )
    trace = metrics.trace
    if trace is not None and (len(trace.steps) != 2 or not 3 <= trace.steps[0] <= trace.steps[1]):
        what = (
            f"{list(trace.steps)} given; the first and last step are required, from 3 on: step 2 is profiled for memory"
        )
        yield Problem("metrics.trace.steps", what)
    if trace is not None and (not trace.ranks or min(trace.ranks) < 0):
        yield Problem("metrics.trace.ranks", f"{list(trace.ranks)} given; rank numbers from 0 are required")


def _data_problems(recipe: Recipe) -> Iterator[Problem]:
    held_out = [] if recipe.data.eval_path is None else [recipe.data.eval_path]
    for source in [*source_weights(recipe.data.path), *held_out]:
        images = recipe.data.format == "image-classification" and image_folders(source)
        if source == "synthetic" or images:
            continue
        try:
            data_files(source)
        except BadInput as error:
            yield from error.problems
