"""Checkpoints read by rows: equal to what transformers loads, and nothing but the own part is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.tiny_llama import TINY_LLAMA
from toolkit.errors import BadInput
from toolkit.recipe.model_section import Lora, Model
from toolkit.runtime.models import stored_tensors
from toolkit.runtime.models.build import build_in_place, build_model, open_weights
from toolkit.runtime.models.first_weights import FileWeights
from toolkit.runtime.models.parameter_shards import Layout, mark_shard
from toolkit.runtime.models.stored_tensors import TensorFile
from toolkit.runtime.proofs.coverage import tiny_model


def saved(section: Model, path: Path) -> Model:
    """A checkpoint on disk, as transformers writes it: mixtures one tensor per expert."""
    build_model(section, 1).to(torch.bfloat16).save_pretrained(path)
    return Model(path=str(path), init="pretrained", precision="bf16")


@pytest.fixture(scope="module", params=["llama", "gpt2", "mixtral", "qwen3_moe", "gpt_oss", "phimoe", "olmoe"])
def section(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return saved(tiny_model(request.param), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def full(section: Model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in build_model(section, 0).named_parameters()}


def test_tensors_are_those_that_transformers_loads(section: Model, full: dict[str, torch.Tensor]) -> None:
    weights = open_weights(section, 0)
    assert isinstance(weights, FileWeights), "nothing is loaded as a whole"
    found = dict(weights.read(full))
    assert found.keys() == full.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.float(), full[name]), name


def test_any_range_of_elements_is_that_of_the_full_tensor(section: Model, full: dict[str, torch.Tensor]) -> None:
    ranges = {n: [(t.numel() // 3, t.numel() - 1), (0, min(5, t.numel())), (2, 2)] for n, t in full.items()}
    for name, parts in open_weights(section, 0).read_ranges(ranges):
        for (low, high), part in zip(ranges[name], parts, strict=True):
            assert torch.equal(part.float(), full[name].flatten()[low:high]), name


@pytest.mark.parametrize("page_bytes", [stored_tensors.PAGE_BYTES, 1], ids=["rows", "own bytes"])
@pytest.mark.parametrize("packs", [1, 2])
def test_slices_along_every_dimension(
    section: Model, full: dict[str, torch.Tensor], packs: int, page_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensors, "PAGE_BYTES", page_bytes)
    for dim in range(3):
        for index in range(2):
            wanted = {}
            for name, tensor in full.items():
                if tensor.ndim > dim and tensor.shape[dim] % (2 * packs) == 0:
                    wanted[name] = torch.nn.Parameter(tensor)
                    shape = tuple(tensor.shape)
                    mark_shard(wanted[name], Layout(dim=dim, index=index, ranks=2, shape=shape, packs=packs))
            for name, own in open_weights(section, 0).read_slices(wanted):
                assert torch.equal(own.float(), wanted[name].shard_layout.slice_of(full[name])), name


def test_a_tensor_rank_reads_no_bytes_of_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = saved(tiny_model("llama"), tmp_path)
    monkeypatch.setattr(stored_tensors, "PAGE_BYTES", 1)
    name = "model.layers.0.mlp.down_proj.weight"
    weights = open_weights(section, 0)
    parameter = torch.nn.Parameter(dict(weights.read([name]))[name])
    mark_shard(parameter, Layout(dim=1, index=1, ranks=2, shape=tuple(parameter.shape)))
    read: list[int] = []
    inner = TensorFile.read_into
    monkeypatch.setattr(TensorFile, "read_into", lambda file, view, at: (read.append(len(view)), inner(file, view, at)))
    dict(weights.read_slices({name: parameter}))
    assert sum(read) == parameter.numel() * parameter.element_size() // 2


def test_a_range_of_experts_reads_these_experts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = saved(tiny_model("mixtral"), tmp_path)
    weights = open_weights(section, 0)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    shape = dict(weights.read([name]))[name].shape
    read: list[int] = []
    inner = TensorFile.read
    monkeypatch.setattr(
        TensorFile, "read", lambda self, dtype, at, elements: read.append(elements) or inner(self, dtype, at, elements)
    )
    each = shape[1] * shape[2]
    list(weights.read_ranges({name: [(each, 2 * each)]}))
    assert sum(read) == each, "gate and up of one expert"


def test_a_new_head_is_the_one_that_transformers_draws(tmp_path: Path) -> None:
    base = saved(tiny_model("llama"), tmp_path)
    section = replace(base, task="classification", num_labels=5)
    weights = open_weights(section, 7)
    assert isinstance(weights, FileWeights)
    expected = dict(build_model(section, 7).named_parameters())
    for name, tensor in weights.read(expected):
        assert torch.equal(tensor.float(), expected[name]), name


@pytest.mark.parametrize("task", [None, "classification"])
@pytest.mark.parametrize("origin", ["file", "scratch"])
def test_adapters_and_the_numbers_that_follow_are_the_same(origin: str, task: Any, tmp_path: Path) -> None:
    base = tiny_model("llama")
    if origin == "file":
        base = saved(base, tmp_path)
    labels = 3 if task else None
    section = replace(base, task=task, num_labels=labels, lora=Lora(rank=4, dropout=0.1), precision="bf16")
    placed = build_in_place(section, 3, torch.bfloat16, "cpu")
    after = torch.rand(3)
    full = build_model(section, 3)
    assert torch.equal(torch.rand(3), after), "dropout draws the same numbers"
    expected = dict(full.named_parameters())
    assert dict(placed.named_parameters()).keys() == expected.keys()
    for name, parameter in placed.named_parameters():
        assert parameter.requires_grad == expected[name].requires_grad, name
        assert torch.equal(parameter, expected[name].to(torch.bfloat16)), name


def cut_short(data: bytes) -> bytes:
    return data[: len(data) - 100]


def endless_header(data: bytes) -> bytes:
    return (2**60).to_bytes(8, "little") + data[8:]


def no_json(data: bytes) -> bytes:
    return data[:8] + b"[" + data[9:]


def moved_offsets(data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for key, value in header.items():
        if key != "__metadata__":
            value["data_offsets"][1] += 2
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


@pytest.mark.parametrize("damage", [cut_short, endless_header, no_json, moved_offsets])
def test_a_broken_file_is_named(damage: Any, tmp_path: Path) -> None:
    section = saved(Model(config=TINY_LLAMA, init="scratch"), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(BadInput, match=r"model\.safetensors is not a complete safetensors file"):
        build_in_place(section, 0, torch.bfloat16, "cpu")
