"""The DeepSpeed config: regenerated, complete, and read by the real DeepSpeedConfig."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolkit.generate import PLANS, generated
from toolkit.plans.deepspeed_config import BUCKET_ELEMENTS, deepspeed_config
from toolkit.plans.plan import Plan
from toolkit.recipe.batch_sections import Reduce
from toolkit.recipe.sections import Train
from toolkit.resources import CONFIGS

TRAIN = Train(global_batch=64, steps=10)


def make(plan: Plan, **options: Any) -> dict[str, Any]:
    return deepspeed_config(plan, replace(TRAIN, **options), params=10**9, backend="cuda", nvme_path="/nvme")


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list) else [value]


@pytest.fixture(scope="module")
def contents() -> dict[Path, str]:
    """Of all generated files. Not made on import: every process that collects tests would plan all recipes."""
    return generated()


def test_generated_files_are_current(contents: dict[Path, str]) -> None:
    differing = [str(path) for path, text in contents.items() if not path.exists() or path.read_text() != text]
    assert differing == [], "run `make generate`"


def test_no_stray_generated_file(contents: dict[Path, str]) -> None:
    present = {*(CONFIGS / "deepspeed").glob("*"), *(CONFIGS / "accelerate").glob("*")}
    assert present <= set(contents)


@pytest.mark.parametrize("name", PLANS)
def test_deepspeed_reads_every_example(name: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    plan = PLANS[name]
    config = json.loads((CONFIGS / "deepspeed" / f"{name}.json").read_text())
    assert "auto" not in leaves(config)
    read = DeepSpeedConfig(config)
    assert read.zero_config.stage == plan.zero_stage
    assert read.train_micro_batch_size_per_gpu == plan.micro_batch
    assert read.gradient_accumulation_steps == plan.grad_accum
    assert read.gradient_clipping == TRAIN.grad_clip
    offloaded = read.zero_config.offload_optimizer is not None
    assert offloaded == (plan.offload != "none")
    assert (read.zero_config.offload_param is not None) == plan.offload.endswith("_params")
    assert read.zero_config.zero_hpz_partition_size == (plan.zero_group if plan.zero_variant == "hpz" else 1)


def test_clipping_off_is_written_out() -> None:
    """DeepSpeed 0.19.3 changed its default from 0 to 1."""
    assert make(PLANS["zero2_bf16"], grad_clip=0.0)["gradient_clipping"] == 0.0


def test_buckets_are_never_larger_than_the_model() -> None:
    """DeepSpeed allocates a bucket whole: 800 MB for a model of a megabyte, otherwise."""
    small = deepspeed_config(PLANS["zero2_bf16"], TRAIN, params=1000, backend="cpu")["zero_optimization"]
    large = deepspeed_config(PLANS["zero2_bf16"], TRAIN, params=10**12, backend="cpu")["zero_optimization"]
    assert (small["reduce_bucket_size"], large["reduce_bucket_size"]) == (1000, BUCKET_ELEMENTS)


@pytest.mark.parametrize("name", ["zero1_bf16", "zero2_bf16", "zero3_bf16"])
@pytest.mark.parametrize(("params", "axes", "asked"), [(1001, {}, None), (4002, {"tp": 2}, None), (10**6, {}, 777)])
def test_buckets_have_an_even_number_of_elements(
    name: str, params: int, axes: dict[str, int], asked: int | None
) -> None:
    """DeepSpeed 0.19.8 asserts that allgather_bucket_size is a multiple of 2."""
    train = replace(TRAIN, reduce=Reduce(bucket_elements=asked))
    config = deepspeed_config(replace(PLANS[name], **axes), train, params=params, backend="cpu")["zero_optimization"]
    odd = asked or params // axes.get("tp", 1)
    assert odd % 2 == 1
    assert config["allgather_bucket_size"] == config["reduce_bucket_size"] == odd + 1


@pytest.mark.parametrize(
    "optimizer", ["adamw", "sgd", "lamb", "lars", "lion", "onebit_adam", "onebit_lamb", "zero_one_adam"]
)
def test_every_optimizer_has_a_config(optimizer: str) -> None:
    config = make(PLANS["data_parallel_bf16"], optimizer=optimizer, lr=0.5)["optimizer"]
    assert config["params"]["lr"] == 0.5
    assert config["type"].lower().replace("zeroone", "zero_one_").replace("onebit", "onebit_") == optimizer
