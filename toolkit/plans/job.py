"""Build the job of a recipe: the shape of the model, the cluster, the workload and the fixed axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.clusters.reader import read_cluster
from toolkit.errors import BadInput, Problem
from toolkit.models.spec import load_model_config
from toolkit.plans.deepspeed_rules import job_problems
from toolkit.plans.plan import Job, Workload
from toolkit.plans.task_spec import image_tokens, task_spec
from toolkit.recipe.batch_sections import Outer
from toolkit.recipe.sections import Model, Recipe
from toolkit.resources import CONFIGS


def make_job(recipe: Recipe, nproc: int | None = None) -> Job:
    """Everything that planning depends on; raises `BadInput` if model, data and cluster do not match."""
    config = raw_config(recipe.model)
    job = Job(
        model=task_spec(config, recipe.model),
        cluster=read_cluster(recipe.cluster, nproc),
        workload=Workload(
            global_batch=recipe.train.global_batch,
            seq_len=image_tokens(config) if recipe.model.task == "image-classification" else recipe.data.seq_len,
            precision=recipe.model.precision,
            optimizer=recipe.train.optimizer,
            flash_attention=recipe.model.attention != "eager",
            lora_rank=recipe.model.lora.rank if recipe.model.lora else 0,
            quantized_base=recipe.model.lora is not None and recipe.model.lora.quantize == "4bit",
            grad_clip=recipe.train.grad_clip,
            **_exchange(recipe.train.outer or Outer()),
            reduce=recipe.train.reduce,
            ramp_start=recipe.train.batch_ramp.start if recipe.train.batch_ramp else 0,
        ),
        fixed=recipe.strategy.fixed(),
    )
    problems = [*_problems(job), *_ignored(config), *job_problems(job)]
    if problems:
        raise BadInput(recipe.name, problems)
    return job


def _exchange(outer: Outer) -> dict[str, Any]:
    """Workload fields that describe the exchange between islands."""
    states = [True, outer.optimizer == "nesterov", outer.mode == "overlap", outer.bits < 32]
    return {
        "exchange_bits": outer.bits,
        "exchange_hidden": outer.mode != "wait",
        "exchange_delay_steps": outer.delay_steps,
        "exchange_states": sum(states),
    }


def raw_config(section: Model) -> Mapping[str, Any]:
    """The Hugging Face config of the recipe's model, as plain JSON values."""
    if section.config is not None:
        return section.config
    assert section.path is not None
    return load_model_config(section.path, models_dir=CONFIGS / "models")


def _problems(job: Job) -> list[Problem]:
    model, work = job.model, job.workload
    problems = []
    devices = job.cluster.devices
    islands = job.fixed.get("islands", 1)
    if devices % islands:
        problems.append(Problem("strategy.islands", f"{islands} given; must divide the {devices} devices"))
    if model.max_positions and work.seq_len > model.max_positions:
        problems.append(
            Problem("data.seq_len", f"{work.seq_len} tokens given; the model takes at most {model.max_positions}")
        )
    devices = job.fixed.get("tp", 1) * job.fixed.get("pp", 1) * job.fixed.get("sp", 1)
    if job.cluster.devices % devices:
        problems.append(Problem("strategy", f"tp·pp·sp = {devices} does not divide the {job.cluster.devices} devices"))
    return problems


def _ignored(config: Mapping[str, Any]) -> list[Problem]:
    """Model settings that would be ignored silently: the loss is the cross-entropy alone, under every strategy."""
    if config.get("output_router_logits") is True:
        what = "true given; router losses are not part of the loss here; set it to false"
        return [Problem("model.config.output_router_logits", what)]
    return []
