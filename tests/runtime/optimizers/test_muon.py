"""Muon: the iteration against torch's and a singular value decomposition, layouts against one process, resuming."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim import _muon

from tests.conftest import Trainer
from tests.helpers.parallel import ADAM, ONE, assert_same, model, run
from toolkit.checkpoints import store
from toolkit.plans.plan import Plan
from toolkit.recipe.optimizer_sections import Muon
from toolkit.run_dir.trajectory import Trajectory, largest_difference
from toolkit.runtime.optimizers.muon import COEFFICIENTS, is_matrix, orthogonal

pytestmark = pytest.mark.slow

MUON = replace(ADAM, optimizer="muon", lr=1e-2, weight_decay=0.1)
LAYOUTS = {
    "dp": {"dp": 2},
    "zero 1": {"dp": 2, "zero_stage": 1},
    "zero 2": {"dp": 2, "zero_stage": 2, "grad_accum": 2},
    "zero 3": {"dp": 2, "zero_stage": 3},
    "tp": {"tp": 2, "grad_accum": 4},
    "tp, zero 1": {"tp": 2, "dp": 2, "zero_stage": 1},
    "tp, zero 3": {"tp": 2, "dp": 2, "zero_stage": 3},
    "pp": {"pp": 2, "grad_accum": 4},
    "pp, zero 1": {"pp": 2, "dp": 2, "zero_stage": 1, "grad_accum": 2},
    "pp 4, zero 1": {"pp": 4, "zero_stage": 1, "grad_accum": 4},  # inner stages have fewer groups of parameters
    "sp, zero 2": {"sp": 2, "zero_stage": 2, "grad_accum": 2},
}


def plan_of(axes: dict[str, int]) -> Plan:
    dp, accum = axes.get("dp", 1), axes.get("grad_accum", 1)
    group = dp if axes.get("zero_stage") else 1
    return Plan(strategy="test", micro_batch=4 // (dp * accum), zero_group=group, precision="fp32", **axes)  # type: ignore[arg-type]


@functools.cache
def alone(kind: str) -> Trajectory:
    """One process."""
    return run(model(kind), ONE, MUON)


@pytest.mark.parametrize("shape", [(6, 6), (5, 12), (12, 5)])
def test_singular_values_come_near_one_and_directions_stay(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonal(matrix, 5)
    assert all(0.6 < float(value) < 1.3 for value in torch.linalg.svdvals(found))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = left.T @ found @ right.T
    assert (inner - inner.diag().diag()).abs().max() < 1e-4


def test_in_bf16_the_iteration_is_torch_s() -> None:
    matrix = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    theirs = _muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7)
    assert torch.equal(orthogonal(matrix.bfloat16(), 5), theirs)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), True),
        ("transformer.h.1.attn.c_attn.weight", (8, 24), True),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 16), True),
        ("model.layers.0.input_layernorm.weight", (8,), False),
        ("model.layers.0.self_attn.q_proj.bias", (8,), False),
        ("model.embed_tokens.weight", (100, 8), False),
        ("lm_head.weight", (100, 8), False),
        ("backbone.layers.0.mixer.conv1d.weight", (8, 1, 4), False),
        ("backbone.layers.0.mixer.A_log", (8, 4), False),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (32, 4), False),
        ("model.layers.0.mlp.gate.weight", (4, 8), False),
    ],
)
def test_matrices_of_the_layers_are_muon_s(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_matrix(name, shape, Muon(adamw=("*.mlp.gate.*",))) is expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_result_of_one_process(layout: str) -> None:
    assert_same(alone("llama"), run(model("llama"), plan_of(LAYOUTS[layout]), MUON))


def test_a_stack_of_experts_is_a_stack_of_matrices() -> None:
    """Under ZeRO 1 the bound of a partition cuts a stack."""
    assert_same(alone("mixtral"), run(model("mixtral"), plan_of(LAYOUTS["zero 1"]), MUON))


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "zero_stage": 1}, {"dp": 2, "zero_stage": 3}])
def test_in_16_bits_losses_stay_near_fp32(axes: dict[str, int]) -> None:
    """Each wrapper has a way of its own to hold masters."""
    rough = run(replace(model("llama"), precision="bf16"), replace(plan_of(axes), precision="bf16"), MUON)
    assert largest_difference(alone("llama").loss, rough.loss) < 2e-2


def test_momentum_is_saved_and_resumed_under_another_strategy(train: Trainer, tmp_path: Path) -> None:
    base = ("train.steps=6", "checkpoint.every=3", "train.optimizer=muon", "train.lr=0.01")
    whole = train(*base, "strategy.name=data_parallel", nproc=1)
    assert whole.losses[-1] < whole.losses[0]
    part = train(*base, "strategy.name=zero", "strategy.zero_stage=3", into=tmp_path / "part")
    assert largest_difference(whole.losses, part.losses) < 1e-5
    saved = store.path_of(part.run.checkpoints, 3)
    rest = train(*base, "strategy.name=tensor_parallel", f"checkpoint.resume={saved}", into=tmp_path / "rest")
    assert largest_difference(whole.losses[3:], rest.losses) < 1e-5
    assert "muon: " in (part.run.path / "logs" / "rank-0.log").read_text()
