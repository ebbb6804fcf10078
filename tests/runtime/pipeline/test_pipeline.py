"""Pipelines of tiny models on real processes, against one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.parallel import ADAM, ONE, SGD, TOKENS, assert_same, model, run, train_as_rank
from toolkit.plans.plan import Plan
from toolkit.run_dir.trajectory import Trajectory
from toolkit.runtime.models.build import SplitRefused, fill, open_weights, skeleton
from toolkit.runtime.pipeline.split import analyse
from toolkit.runtime.pipeline.stage import Stage
from toolkit.runtime.proofs.coverage import tiny_model
from toolkit.runtime.supervision.warm_pool import call_on_ranks

TWO = Plan(strategy="pipeline", pp=2, micro_batch=1, grad_accum=4, precision="fp32", pipeline_bounds=(0, 2, 4))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tied_and_untied_models_under_sgd_with_a_tight_clip(kind: str, stage: int) -> None:
    section = model(kind)
    assert_same(run(section, ONE, SGD), run(section, replace(TWO, zero_stage=stage, zero_group=1), SGD))


@pytest.mark.parametrize("data", ["padded", "packed"])
def test_masks_and_positions_are_made_on_every_stage(data: str) -> None:
    section = model("llama")
    assert_same(run(section, ONE, data=data), run(section, TWO, data=data))


def test_three_uneven_stages_with_recompute_and_experts() -> None:
    section = model("mixtral", num_hidden_layers=5)
    plan = replace(TWO, pp=3, pipeline_bounds=(0, 1, 4, 5), recompute="full", grad_accum=2, micro_batch=2)
    assert_same(run(section, ONE), run(section, plan))


def test_replicas_of_a_pipeline_in_bf16() -> None:
    section = model("llama")
    plan = replace(TWO, dp=2, zero_stage=1, zero_group=2, grad_accum=2, precision="bf16")
    assert_same(run(section, ONE), run(section, plan), loss=2e-2, norm=1e-1)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_tied_weights_in_bf16(micro_batches: int) -> None:
    """One micro-batch takes DeepSpeed's ZeRO optimizer, several its BF16 optimizer: both sum tied gradients."""
    section = model("gpt2")
    plan = replace(TWO, zero_stage=1, grad_accum=micro_batches, micro_batch=4 // micro_batches, precision="bf16")
    assert_same(run(section, ONE, SGD), run(section, plan, SGD), loss=2e-2, norm=1e-1)


def test_a_rank_holds_its_own_layers_only() -> None:
    section = tiny_model("llama")
    split = analyse(skeleton(section), (0, 3, 4))
    sizes = []
    for index in range(2):
        part = skeleton(section)
        stage = Stage(part, split, index, torch.float32)
        stage.parameters_by_name = fill(part, open_weights(section, 0), stage.parameters_by_name)
        assert not any(parameter.is_meta for parameter in stage.parameters())
        own = {name.split(".")[2] for name in stage.parameters_by_name if name.startswith("model.layers.")}
        assert own == ({"0", "1", "2"} if index == 0 else {"3"})
        sizes.append(sum(parameter.numel() for parameter in stage.parameters()))
    assert part.model.embed_tokens.weight.untyped_storage().nbytes() == 4  # hollow: one element
    assert sum(sizes) == sum(parameter.numel() for parameter in skeleton(section).parameters())


def test_owners_are_found_by_use() -> None:
    split = analyse(skeleton(tiny_model("gpt2")), (0, 2, 4))
    assert split.owners["transformer.wte.weight"] == {0, 1}
    assert split.owners["transformer.wpe.weight"] == {0}
    assert split.owners["transformer.ln_f.weight"] == {1}
    assert split.shared == [("transformer.wte.weight", (0, 1))]


def test_layers_that_run_more_than_once_are_refused() -> None:
    with pytest.raises(SplitRefused, match="not called once each in order"):
        analyse(skeleton(tiny_model("hrm_text")), (0, 2, 4))


def test_a_wrong_norm_would_be_seen() -> None:
    """The test's own eyes: unclipped SGD is far from clipped SGD."""
    section = model("llama")
    clipped, free = run(section, ONE, SGD), run(section, ONE, replace(SGD, grad_clip=0.0))
    with pytest.raises(AssertionError):
        assert_same(clipped, free)
    assert ADAM.grad_clip == 1.0


def train_in_batches(plan: Plan) -> tuple[Trajectory, list[tuple[str, int, int]]]:
    """A run whose exchanges are batched as on GPUs; (kind, elements, address) of every transfer."""
    from toolkit.runtime.pipeline import transfers

    transfers.BATCHES = ("gloo",)
    seen: list[tuple[str, int, int]] = []
    exchange = torch.distributed.batch_isend_irecv

    def noted(operations: list[torch.distributed.P2POp]) -> list[torch.distributed.Work]:
        seen.extend((one.op.__name__, one.tensor.numel(), one.tensor.data_ptr()) for one in operations)
        return exchange(operations)

    torch.distributed.batch_isend_irecv = noted
    return train_as_rank(model("llama"), plan, SGD, "packed"), seen


@pytest.mark.slow
def test_tensor_ranks_send_a_share_each_into_reused_buffers() -> None:
    """Two stages of two tensor ranks: exchanges of a turn in one batch give the losses of one after another."""
    plan = replace(TWO, strategy="hybrid", tp=2)
    expected = run(model("llama"), plan, SGD, data="packed")
    assert_same(run(model("llama"), ONE, SGD, data="packed"), expected)
    config = model("llama").config
    assert config is not None
    for found, transfers in call_on_ranks(train_in_batches, plan, nproc=4):
        assert found == expected
        assert {kind for kind, _, _ in transfers} == {"isend", "irecv"}
        assert {elements for _, elements, _ in transfers} == {TOKENS * config["hidden_size"] // 2}
        assert len({address for kind, _, address in transfers if kind == "irecv"}) <= 2  # one per slot, one gradient
        assert len(transfers) == 2 * plan.grad_accum * len(found.loss)
