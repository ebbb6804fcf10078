"""ZeRO 3 from each rank's own share: the same shards as those of a full model, and ranks that differ are found."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from benchmarks.harness.tiny_llama import TINY_LLAMA
from toolkit.plans.deepspeed_config import deepspeed_config
from toolkit.plans.plan import Plan
from toolkit.recipe.model_section import Lora, Model
from toolkit.recipe.schedules import make_schedule
from toolkit.recipe.sections import Train
from toolkit.runtime.build_engine import EngineSpec, build_engine
from toolkit.runtime.distributed.process_group import current_world
from toolkit.runtime.models.build import build_in_place, build_model
from toolkit.runtime.models.parameter_shards import full_shape
from toolkit.runtime.models.zero3_start import sharded_model
from toolkit.runtime.supervision.warm_pool import Failure, call_on_ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
}


def shards(section: Model, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """As one rank: own shards made one at a time, and those that DeepSpeed cuts out of the full model."""
    own = sharded_model(section, seed, CONFIG, torch.bfloat16)
    full = build_model(section, seed)
    deepspeed.zero.Init(module=full.to(torch.bfloat16), config_dict_or_path=copy.deepcopy(CONFIG))
    return _shards_of(own), _shards_of(full)


def _shards_of(model: torch.nn.Module) -> dict[str, Any]:
    return {
        name: (full_shape(parameter), parameter.ds_persist, parameter.ds_tensor.float().tolist())
        for name, parameter in model.named_parameters()
    }


@pytest.fixture(scope="module", params=["scratch", "tied scratch", "file", "tied file", "adapted file"])
def section(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    config = {**TINY_LLAMA, "tie_word_embeddings": "tied" in request.param, "vocab_size": 263}  # an odd share
    scratch = Model(config=config, init="scratch", precision="bf16")
    if "file" not in request.param:
        return scratch
    path = tmp_path_factory.mktemp("model")
    build_model(scratch, 1).to(torch.bfloat16).save_pretrained(path)
    adapters = Lora(rank=4) if "adapted" in request.param else None
    return Model(path=str(path), init="pretrained", precision="bf16", lora=adapters)


def test_shards_are_those_of_the_full_model(section: Model) -> None:
    for own, expected in call_on_ranks(shards, section, 3, nproc=2, timeout_seconds=120):
        assert own == expected


def test_a_full_model_made_in_place_is_the_rounded_one(section: Model) -> None:
    placed, full = build_in_place(section, 3, torch.bfloat16, "cpu"), build_model(section, 3)
    expected = dict(full.named_parameters())
    assert dict(placed.named_parameters()).keys() == expected.keys()
    for name, parameter in placed.named_parameters():
        assert torch.equal(parameter, expected[name].to(torch.bfloat16)), name
    for name, buffer in placed.named_buffers():
        assert torch.equal(buffer, dict(full.named_buffers())[name]), name


def weights_after_the_file_is_lost(path: str, stage: int) -> tuple[list[float], list[float], bool]:
    """As one rank: frozen and trained weights of an engine, before and after its model's file was overwritten."""
    plan = Plan(strategy="zero", dp=2, zero_group=2, zero_stage=stage, micro_batch=1)
    train = Train(global_batch=2, steps=1, lr=1e-4)
    spec = EngineSpec(
        model=Model(path=path, init="pretrained", precision="bf16", freeze=("*embed_tokens*",)),
        train=train,
        plan=plan,
        deepspeed=deepspeed_config(plan, train, params=100_000, backend="cpu"),
        schedule=make_schedule(train, 1),
    )
    built: Any = build_engine(spec, current_world())
    before = [float(p.float().abs().sum()) for p in built.module.parameters()]
    torch.distributed.barrier()
    file = Path(path) / "model.safetensors"
    if os.environ["RANK"] == "0":
        with file.open("r+b") as opened:
            opened.write(bytes(file.stat().st_size))
    torch.distributed.barrier()
    after = [float(p.float().abs().sum()) for p in built.module.parameters()]
    return before, after, any(not p.requires_grad for p in built.module.parameters())


@pytest.mark.parametrize("stage", [1, 2])
def test_a_run_does_not_notice_that_its_files_are_overwritten(stage: int, tmp_path: Path) -> None:
    build_model(Model(config=TINY_LLAMA, init="scratch", precision="bf16"), 1).to(torch.bfloat16).save_pretrained(
        tmp_path
    )
    for found in call_on_ranks(weights_after_the_file_is_lost, str(tmp_path), stage, nproc=2, timeout_seconds=120):
        assert not isinstance(found, Failure), found
        before, after, some_are_frozen = found
        assert some_are_frozen
        assert all(before)
        assert before == after


def other_seed_on_rank_1(section: Model) -> None:
    sharded_model(section, int(os.environ["RANK"]), CONFIG, torch.bfloat16)


def own_file(root: str, config: dict[str, Any]) -> None:
    section = Model(path=f"{root}/{os.environ['RANK']}", init="pretrained", precision="bf16")
    sharded_model(section, 0, config, torch.bfloat16)


def test_ranks_with_other_weights_are_found() -> None:
    section = Model(config=TINY_LLAMA, init="scratch", precision="bf16")
    results = call_on_ranks(other_seed_on_rank_1, section, nproc=2, timeout_seconds=120)
    assert all(isinstance(result, Failure) and "starts with other weights" in result.reason for result in results)


HPZ = {"zero_hpz_partition_size": 3}


@pytest.mark.parametrize(("row", "variant"), [(8, {}), (-1, {}), (15, HPZ)])
def test_one_other_element_in_the_file_of_one_rank_is_found(row: int, variant: dict[str, Any], tmp_path: Path) -> None:
    """In its own shard, in the one that it compares, and anywhere if it reads all elements, as for hpZ."""
    name, wide = "model.layers.1.mlp.down_proj.weight", {**TINY_LLAMA, "intermediate_size": 512}
    for rank in range(3):
        tiny = build_model(Model(config=wide, init="scratch"), 0)
        with torch.no_grad():
            tiny.get_parameter(name)[row, -1] += rank == 2
        tiny.to(torch.bfloat16).save_pretrained(tmp_path / str(rank))
    config = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], **variant}}  # type: ignore[dict-item]
    for result in call_on_ranks(own_file, str(tmp_path), config, nproc=3, timeout_seconds=120):
        assert isinstance(result, Failure)
        assert "starts with other weights than rank" in result.reason
        assert f"in 1 parameters, first {name}" in result.reason
