"""LoRA adapters in tensor shards and pipeline stages: one process's losses, one checkpoint for all strategies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Trainer
from tests.helpers.parallel import ONE, SGD, assert_same, batch, engine_of, micro_batches, model, run
from toolkit import cli
from toolkit.errors import BadInput
from toolkit.plans.plan import Plan
from toolkit.plans.split_verdicts import Axes
from toolkit.recipe.model_section import Lora, Model
from toolkit.recipe.sections import Train
from toolkit.runtime.engine.replica import ReplicaEngine
from toolkit.runtime.models.build import build_in_place, build_model
from toolkit.runtime.models.first_weights import MAGNITUDE
from toolkit.runtime.models.parameter_shards import Layout, layout_of
from toolkit.runtime.proofs.split_proof import prove
from toolkit.runtime.sharding import shard_model, styles
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure

pytestmark = pytest.mark.slow  # dozens of engines; quick tests of each strategy are in test_training.py

TENSOR = Plan(strategy="tensor_parallel", tp=2, micro_batch=4, precision="fp32")
PIPELINE = Plan(strategy="pipeline", pp=2, micro_batch=1, grad_accum=4, precision="fp32", pipeline_bounds=(0, 2, 4))
PLANS = {
    "tensor": TENSOR,
    "tensor, ZeRO 3": replace(TENSOR, dp=2, zero_stage=3, zero_group=2, micro_batch=2),
    "pipeline": PIPELINE,
    "pipeline, ZeRO 1": replace(PIPELINE, dp=2, zero_stage=1, zero_group=2, grad_accum=2),
    "hybrid": replace(PIPELINE, strategy="hybrid", tp=2, zero_stage=1),
    "hybrid, recomputing": replace(PIPELINE, strategy="hybrid", tp=2, recompute="full"),
}


def adapted(kind: str) -> Model:
    return replace(model(kind), lora=Lora(rank=4))


@pytest.mark.parametrize(
    ("kind", "name"), [*(("llama", name) for name in PLANS), ("gpt2", "hybrid"), ("mixtral", "tensor")]
)
def test_adapters_learn_as_in_one_process(kind: str, name: str) -> None:
    """New adapters are zero: from the second step on both of their matrices have gradients."""
    section, train = adapted(kind), replace(SGD, lr=0.5, grad_clip=0.5)
    one = run(section, ONE, train, "padded")
    assert one.loss[-1] != pytest.approx(one.loss[0], rel=1e-4), "the adapters learn"
    assert_same(one, run(section, PLANS[name], train, "padded"))


Shards = dict[str, tuple[torch.Tensor, Layout | None]]


def _after_20_steps(section: Model, plan: Plan, train: Train) -> Shards:
    """What each rank runs: its adapters, with their places in the full ones."""
    engine = engine_of(section, plan, train)
    for number in range(20):
        engine.step(list(micro_batches(batch(number, "full"), plan, engine.replica)))
    assert isinstance(engine, ReplicaEngine)
    named = engine.module.named_parameters()
    return {name: (p.detach().clone(), layout_of(p)) for name, p in named if p.requires_grad}


def test_adapters_after_20_steps_are_those_of_one_process() -> None:
    """With SGD. AdamW divides gradients near zero by their own size, and so makes their rounding errors visible."""
    section, train = adapted("qwen3"), replace(SGD, lr=0.02, grad_clip=1.0)
    (expected,), cut = (
        call_on_ranks(_after_20_steps, section, plan, train, nproc=plan.devices, timeout_seconds=600.0)
        for plan in (ONE, TENSOR)
    )
    assert first_failure([expected, *cut]) is None
    for shards in cut:
        for name, (found, layout) in shards.items():
            full = expected[name][0]
            assert float((found - (layout.slice_of(full) if layout else full)).abs().max()) <= 1e-7, name


@pytest.mark.parametrize("axes", [Axes(2, 1, 1), Axes(2, 2, 1)])
def test_the_proof_covers_adapters(monkeypatch: pytest.MonkeyPatch, axes: Axes) -> None:
    section = Model(config={"model_type": "qwen3"}, init="scratch", lora=Lora(rank=16))
    assert prove(section, axes).ok
    monkeypatch.setitem(shard_model.BESIDE, "colwise", ("lora_B", styles.columns))
    monkeypatch.setattr(styles, "copy_in", lambda tensor, group: tensor)
    monkeypatch.setitem(shard_model.BESIDE, "rowwise", ("lora_B", styles.columns))
    found = prove(section, axes)
    assert not found.ok, "adapters that are cut in the wrong place"


def test_an_adapter_does_not_depend_on_the_strategy(train: Trainer, tmp_path: Path) -> None:
    """Saved under a hybrid plan, resumed in one process, exported as a plain peft directory."""
    base = ("model.lora={rank: 4}", "train.steps=6", "checkpoint.every=3", "train.schedule=constant", "train.warmup=0")
    whole = train(*base, "strategy.name=data_parallel", nproc=1)
    split = train(*base, "train.steps=3", "strategy={name: hybrid, tp: 2, pp: 2, dp: 1, zero_stage: 1}", nproc=4)
    assert split.losses == pytest.approx(whole.losses[:3], rel=1e-5)
    resumed = train(*base, "strategy.name=data_parallel", nproc=1, into=split.run.path)
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-5)
    for name, done in (("whole", whole), ("split", resumed)):
        assert cli.main(["export", str(done.run.path), str(tmp_path / name)]) == 0
    expected, found = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "split"))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


def test_4_bit_weights_are_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model={path: llama-3-8b, lora: {quantize: 4bit}}", "cluster=dgx-h100", "strategy={name: tensor_parallel}"]
    assert cli.main(["plan", "recipes/demo.yaml", *words]) == 3
    assert "4-bit weights" in " ".join(capsys.readouterr().out.split())


def test_a_target_that_does_not_exist_is_named(train: Trainer) -> None:
    with pytest.raises(AssertionError, match=r"(?s)model\.lora\.targets.*q_proj"):
        train("model.lora={targets: [q_projection]}", nproc=1)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_dora_starts_with_the_lengths_of_the_rows(kind: str) -> None:
    """A model that gets its weights one at a time has peft's own magnitudes, transposed layers included."""
    section = replace(model(kind), lora=Lora(rank=4, dora=True))
    whole, hollow = build_model(section, 0), build_in_place(section, 0, torch.float32, "cpu")
    lengths = {name: p for name, p in whole.named_parameters() if MAGNITUDE in name}
    assert lengths
    placed = dict(hollow.named_parameters())
    for name, expected in lengths.items():
        torch.testing.assert_close(placed[name], expected)


@pytest.mark.parametrize(
    "plan", [replace(ONE, strategy="zero", dp=2, zero_stage=2, zero_group=2, micro_batch=2), PIPELINE]
)
def test_dora_learns_as_in_one_process(plan: Plan) -> None:
    section, train = replace(model("llama"), lora=Lora(rank=4, dora=True)), replace(SGD, lr=0.5, grad_clip=0.5)
    one = run(section, ONE, train, "padded")
    assert one.loss[-1] != pytest.approx(one.loss[0], rel=1e-4), "the adapters learn"
    assert_same(one, run(section, plan, train, "padded"))


@pytest.mark.parametrize("axes", ["{name: tensor_parallel, tp: 2}", "{name: zero, zero_stage: 3}"])
def test_dora_needs_complete_weights(axes: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model={path: llama-3-8b, lora: {dora: true}}", "cluster=dgx-h100", f"strategy={axes}"]
    assert cli.main(["plan", "recipes/demo.yaml", *words]) == 3
    assert "DoRA (model.lora.dora) takes the length" in " ".join(capsys.readouterr().out.split())


def test_adapters_that_are_added_to_a_weight_itself_are_cut() -> None:
    """peft treats the router of afmoe as a parameter, not as a linear layer."""
    section = Model(config={"model_type": "afmoe"}, init="scratch", lora=Lora(rank=3))
    assert prove(section, Axes(2, 1, 1)).ok


def test_principal_parts_are_taken_out_of_the_weights() -> None:
    """PiSSA: adapters and what is left of the weights are the model, and what is left has the small singular values."""
    plain = model("llama")
    section = replace(plain, lora=Lora(rank=4, alpha=8, start="pissa"))
    whole, placed = build_model(section, 0), build_in_place(section, 0, torch.float32, "cpu")
    for (name, one), (_, other) in zip(whole.named_parameters(), placed.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    ids = torch.arange(3, 15)[None]
    torch.testing.assert_close(whole(ids).logits, build_model(plain, 0)(ids).logits, atol=1e-5, rtol=0)
    layer = whole.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    before = build_model(plain, 0).get_submodule("model.layers.0.mlp.up_proj").weight
    left, all_sizes = (torch.linalg.svdvals(one.detach()) for one in (layer.base_layer.weight, before))
    assert float(left[0]) == pytest.approx(float(all_sizes[4]), rel=0.05)


@pytest.mark.parametrize("name", ["tensor, ZeRO 3", "hybrid"])
def test_principal_parts_are_those_of_one_process(name: str) -> None:
    section = replace(model("gpt2"), lora=Lora(rank=4, start="pissa"))
    train = replace(SGD, lr=0.1, grad_clip=0.5)
    assert_same(run(section, ONE, train), run(section, PLANS[name], train))


def test_principal_parts_of_experts_are_refused() -> None:
    with pytest.raises(BadInput, match="pissa is for linear layers"):
        build_model(replace(model("mixtral"), lora=Lora(rank=4, start="pissa")), 0)
