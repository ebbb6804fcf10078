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
from toolkit.recipe.model_section import Model
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


@pytest.fixture(scope="module", params=["scratch", "tied scratch", "file", "tied file"])
def section(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    config = {**TINY_LLAMA, "tie_word_embeddings": "tied" in request.param, "vocab_size": 263}  # an odd share
    scratch = Model(config=config, init="scratch", precision="bf16")
    if "file" not in request.param:
        return scratch
    path = tmp_path_factory.mktemp("model")
    build_model(scratch, 1).to(torch.bfloat16).save_pretrained(path)
    return Model(path=str(path), init="pretrained", precision="bf16")


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


def other_seed_on_rank_1(section: Model) -> None:
    sharded_model(section, int(os.environ["RANK"]), CONFIG, torch.bfloat16)


def test_ranks_with_other_weights_are_found() -> None:
    section = Model(config=TINY_LLAMA, init="scratch", precision="bf16")
    results = call_on_ranks(other_seed_on_rank_1, section, nproc=2, timeout_seconds=120)
    failures = [result for result in results if isinstance(result, Failure)]
    assert failures
    assert "reads other weights" in failures[0].reason


def test_the_file_of_one_rank_differs(tmp_path: Path) -> None:
    """Only the own elements are read, so a rank with another file must be found by the sample."""
    for rank in (0, 1):
        build_model(Model(config=TINY_LLAMA, init="scratch"), rank).to(torch.bfloat16).save_pretrained(
            tmp_path / str(rank)
        )
    results = call_on_ranks(own_file, str(tmp_path), nproc=2, timeout_seconds=120)
    assert any(isinstance(result, Failure) and "reads other weights" in result.reason for result in results)


def own_file(root: str) -> None:
    section = Model(path=f"{root}/{os.environ['RANK']}", init="pretrained", precision="bf16")
    sharded_model(section, 0, CONFIG, torch.bfloat16)
