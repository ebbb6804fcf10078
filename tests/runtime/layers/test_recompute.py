"""Layers that recompute: the same losses and gradients, fewer bytes, no traffic twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.helpers import planning
from tests.helpers.parallel import ONE, assert_same, batch, model, run
from toolkit.clusters.devices import DEVICES
from toolkit.cost.activations import layer_input_bytes, products_bytes
from toolkit.cost.execution import of_plan
from toolkit.models.spec import read_model_config
from toolkit.plans.plan import Job, Plan
from toolkit.recipe.axes import RECOMPUTES
from toolkit.recipe.model_section import Lora
from toolkit.run_dir.trajectory import Trajectory
from toolkit.runtime.layers.recompute import recompute_layers
from toolkit.runtime.models.attention import forward
from toolkit.runtime.models.build import build_model

pytestmark = pytest.mark.slow  # dozens of engines; quick tests of each strategy are in test_training.py

MORE = RECOMPUTES[1:]


def outcome(kind: str, mode: str, data: str = "packed") -> list[torch.Tensor]:
    """Loss and gradients of one micro-batch."""
    net = build_model(model(kind), 0).train()
    recompute_layers(net, mode)
    logits = forward(net, batch(0, data)).logits
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


def test_results_of_a_llama_are_those_without_recompute_bit_for_bit() -> None:
    expected = outcome("llama", "none")
    for mode in MORE:
        assert all(torch.equal(one, other) for one, other in zip(expected, outcome("llama", mode), strict=True)), mode


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "gemma2", "gpt_oss"])
def test_results_of_other_types_are_equal_to_rounding(kind: str) -> None:
    """Linears with bias, experts, soft caps and sinks, whose attention recomputes its blocks itself."""
    for one, other in zip(outcome(kind, "none"), outcome(kind, "selective"), strict=True):
        assert float((one - other).abs().max()) <= 1e-6 * float(one.abs().max())


def kept_bytes(mode: str, layers: int) -> int:
    """Bytes of live tensors that a forward pass leaves."""
    net = build_model(model("llama", num_hidden_layers=layers), 0).train()
    recompute_layers(net, mode)
    micro = batch(0, "full")
    forward(net, micro)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        held = forward(net, micro).logits
    total = sum(event.nbytes() for event in memory_events(watch))
    del held
    return total


def memory_events(watch: Any) -> list[Any]:
    return [event for event in watch.profiler.kineto_results.events() if event.name() == "[memory]"]


def test_selective_keeps_products_and_the_layer_input_as_predicted() -> None:
    """Bytes per layer that a forward pass leaves: counted, and by the memory model."""
    job = cpu_job()
    counted = {mode: (kept_bytes(mode, 6) - kept_bytes(mode, 2)) / 4 for mode in RECOMPUTES}
    e = of_plan(Plan(strategy="data_parallel", micro_batch=4, precision="fp32", recompute="selective"), job)
    least = layer_input_bytes(e) + torch.get_rng_state().numel()  # a layer that is recomputed keeps its random state
    assert counted["selective"] == pytest.approx(products_bytes(e) + least, rel=0.03)
    assert counted["full"] == pytest.approx(least, rel=0.03)
    assert counted["offload"] == pytest.approx(counted["full"], rel=0.03)
    assert counted["selective"] < 0.6 * counted["none"]


def cpu_job() -> Job:
    """The job of `batch` on a tiny Llama, on a CPU."""
    section = model("llama")
    assert section.config is not None
    spec = read_model_config(section.config)
    cpu = replace(DEVICES["A100-SXM4-80GB"], name="cpu", backend="cpu")
    return planning.job(
        spec, replace(planning.cluster(per_node=1), device=cpu), global_batch=4, seq_len=16, precision="fp32"
    )


ZERO = Plan(strategy="zero", dp=2, zero_group=2, micro_batch=1, grad_accum=2, precision="fp32")
PLANS = {
    "zero 1": replace(ZERO, zero_stage=1),
    "zero 3": replace(ZERO, zero_stage=3),
    "tensor": Plan(strategy="tensor_parallel", tp=2, micro_batch=4, precision="fp32"),
    "pipeline": Plan(
        strategy="pipeline", pp=2, micro_batch=1, grad_accum=4, precision="fp32", pipeline_bounds=(0, 2, 4)
    ),
    "sequence": Plan(strategy="sequence_parallel", sp=2, micro_batch=4, precision="fp32"),
}


@pytest.fixture(scope="module")
def alone() -> Trajectory:
    """One process without recompute."""
    return run(model("llama"), ONE, data="packed")


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "selective") for name in PLANS), ("zero 3", "offload"), ("pipeline", "offload")]
)
def test_every_engine_trains_as_one_process(name: str, mode: str, alone: Trajectory) -> None:
    assert_same(alone, run(model("llama"), replace(PLANS[name], recompute=mode), data="packed"))


def test_adapters_train_with_recompute() -> None:
    section = replace(model("llama"), lora=Lora(rank=4))
    expected = run(section, ONE)
    for mode in ("selective", "offload"):
        assert_same(expected, run(section, replace(ONE, recompute=mode)))


def test_operators_of_hooks_may_differ_between_the_passes() -> None:
    """As under ZeRO 3, which gathers parameters by hooks inside layers, at other places in the backward pass."""
    expected = outcome("llama", "none")
    net = build_model(model("llama"), 0).train()
    recompute_layers(net, "selective")
    calls = iter(range(10**6))

    def gather(*_: Any) -> None:
        for _ in range(next(calls)):
            torch.empty(2).fill_(1)

    for module in net.model.layers[0].modules():
        module.register_forward_pre_hook(gather)
    logits = forward(net, batch(0, "packed")).logits
    logits.square().mean().backward()
    found = [logits.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
