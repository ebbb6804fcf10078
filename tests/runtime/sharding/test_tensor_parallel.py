"""Tensor shards of tiny models on real processes, against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.parallel import ADAM, ONE, SGD, assert_same, model, run, train_as_rank
from toolkit.plans.plan import Plan
from toolkit.recipe.model_section import Model
from toolkit.run_dir.trajectory import Trajectory
from toolkit.runtime.layers.recompute import recompute_layers
from toolkit.runtime.models.build import fill, open_weights, skeleton
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.models.parameter_shards import layout_of
from toolkit.runtime.proofs.coverage import tiny_model
from toolkit.runtime.sharding import collectives, shard_model, sharding_plan
from toolkit.runtime.sharding.collectives import TensorGroup
from toolkit.runtime.sharding.shard_model import loss_in_shards, shard
from toolkit.runtime.sharding.vocab_parallel_loss import VocabularyLoss
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure

SMOOTH = {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True}
"""T5 as of version 1.1. With the ReLU of the first version, a rounding error may switch an element off."""
TWO = Plan(strategy="tensor_parallel", tp=2, micro_batch=4, precision="fp32")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom", "falcon", "mixtral"])
def test_every_tier_under_sgd_with_a_tight_clip(kind: str) -> None:
    section = model(kind)
    assert_same(run(section, ONE, SGD), run(section, TWO, SGD))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_of_shards_under_zero(stage: int) -> None:
    section = model("qwen3")
    plan = replace(TWO, dp=2, zero_stage=stage, zero_group=2, micro_batch=1, grad_accum=2)
    assert_same(run(section, ONE), run(section, plan))


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("t5", {}),
        ("bart", {}),
        ("t5", {"strategy": "hybrid", "pp": 2, "micro_batch": 1, "grad_accum": 4, "pipeline_bounds": (0, 6, 8)}),
    ],
)
def test_large_tables_of_an_encoder_decoder_are_cut_by_words(kind: str, axes: dict[str, Any]) -> None:
    """Both halves have the table, under names of their own, and the head shares it."""
    smooth = SMOOTH if kind == "t5" else {}
    section = replace(model(kind, vocab_size=2 * sharding_plan.LARGE_TABLE, **smooth), task="seq2seq")
    plan = replace(TWO, **axes)
    assert_same(run(section, ONE, SGD, "pairs"), run(section, plan, SGD, "pairs"))


@pytest.mark.slow
def test_more_ranks_than_key_value_heads() -> None:
    section = model("llama", num_key_value_heads=2)
    assert_same(run(section, ONE, SGD), run(section, replace(TWO, tp=4), SGD))


def test_experts_whose_slices_do_not_fit_grouped_products() -> None:
    """Six columns of fp32 are 24 bytes; torch's grouped products want multiples of 16."""
    section = model("mixtral", intermediate_size=12)
    assert_same(run(section, ONE, SGD), run(section, TWO, SGD))


@pytest.mark.parametrize("data", ["padded", "packed"])
def test_masks_positions_and_recompute(data: str) -> None:
    section = model("llama")
    assert_same(run(section, ONE, data=data), run(section, replace(TWO, recompute="full"), data=data))


def test_each_rank_holds_its_shard_only() -> None:
    whole = sum(parameter.numel() for parameter in skeleton(tiny_model("llama")).parameters())
    held = []
    for index in range(2):
        part = skeleton(tiny_model("llama"))
        shard(part, TensorGroup(None, index, 2))
        held.append(sum(parameter.numel() for parameter in part.parameters()))
        norms = [p for n, p in part.named_parameters() if n.endswith("norm.weight")]
        assert all(layout_of(norm) is None for norm in norms)
    assert max(held) < 0.52 * whole


def train_with_forgotten_sums(section: Model, plan: Plan) -> Trajectory:
    """Query and key norms sit inside sharded attention: leave their gradients partial."""
    shard_model.STYLES["replicated_with_grad_allreduce"] = lambda module, sharder: None
    return train_as_rank(section, plan, ADAM, "full")


def test_partial_gradients_stop_the_first_step_with_names() -> None:
    failure = first_failure(call_on_ranks(train_with_forgotten_sums, model("qwen3"), TWO, nproc=2))
    assert failure is not None
    assert failure.refused
    assert "q_norm.weight" in failure.details
    assert "different gradients on tensor ranks" in failure.reason


def test_analysis_finds_pairs_and_falls_back_to_gathered_linears() -> None:
    styles, heads = sharding_plan.tensor_styles(skeleton(tiny_model("gpt2")), 2)
    assert styles["transformer.h.0.attn.c_attn"] == "packed3_colwise"
    assert styles["transformer.h.0.mlp.c_proj"] == "rowwise"
    assert styles["transformer.wte"] == "embedding_rowwise"
    assert styles["lm_head"] == "colwise_gather_output"
    assert "transformer.h.0.attn" in heads
    styles, heads = sharding_plan.tensor_styles(skeleton(tiny_model("mpt")), 2)
    assert set(styles.values()) == {"colwise_gather_output", "embedding_rowwise"}
    assert heads == []


def test_collectives_of_one_rank_change_nothing() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    assert torch.equal(TensorGroup(None, 0, 1).cut(tensor), tensor)


def reductions_on_rank(recompute: str) -> tuple[int, int, int]:
    """Layers of a Llama, and reductions of hidden states in its forward and its backward pass."""
    section = tiny_model("llama")
    shards = skeleton(section)
    group = TensorGroup(torch.distributed.group.WORLD, torch.distributed.get_rank(), 2)
    vocabulary = shard(shards, group, sliced_logits=True)
    assert isinstance(vocabulary, VocabularyLoss)
    loss = loss_in_shards(shards, group, vocabulary)
    fill(shards, open_weights(section, 0))
    recompute_layers(shards.train(), recompute)
    ids = torch.arange(8).view(1, 8)
    seen: list[int] = []
    reduce = collectives.dist.all_reduce

    def counted(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        seen.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    collectives.dist.all_reduce = counted
    loss.expect(MicroBatch(ids, ids))
    total = loss(shards(input_ids=ids, use_cache=False).logits, ids)
    hidden = ids.numel() * shards.config.hidden_size
    forward = seen.count(hidden)
    total.backward()  # type: ignore[no-untyped-call]
    return shards.config.num_hidden_layers, forward, seen.count(hidden) - forward


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("selective", 0), ("full", 1), ("offload", 1)])
def test_every_input_of_a_sharded_region_is_reduced_once(recompute: str, again: int) -> None:
    """Query, key and value share an input, and so do gate and up: 2 reductions per layer and direction, and 1.

    A layer that is recomputed in full sums the output of attention once more; its own output is not needed again.
    """
    for layers, forward, backward in call_on_ranks(reductions_on_rank, recompute, nproc=2):
        assert (forward, backward) == (2 * layers + 1, (2 + again) * layers + 1)


def order_on_rank() -> list[str]:
    """What happens in the backward pass of two linears over one replicated value."""
    group = TensorGroup(torch.distributed.group.WORLD, torch.distributed.get_rank(), 2)
    seen: list[str] = []
    start, gradient = group.start_sum, collectives.weight_gradient

    class Work:
        def __init__(self, tensor: torch.Tensor) -> None:
            seen.append("sum starts")
            self._work = start(tensor)

        def wait(self) -> None:
            self._work.wait()
            seen.append("sum ends")

    def computed(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        seen.append("weight gradient")
        return gradient(rows, x)

    group.start_sum = Work  # type: ignore[method-assign]
    collectives.weight_gradient = computed
    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)
    first, second = (torch.randn(5, 4, requires_grad=True) for _ in range(2))
    (group.linear(x, first, None).sum() + group.linear(x, second, None).square().sum()).backward()
    (x @ first.t()).sum().backward()
    assert x.grad is not None
    own = x.grad.clone()
    x.grad = None
    (2 * (x @ first.t()).sum() + 2 * (x @ second.t()).square().sum()).backward()  # ranks are equal: the sum is twice
    torch.testing.assert_close(own - first.sum(0).expand_as(own), x.grad)
    return seen


def test_the_sum_over_ranks_runs_while_a_weight_gradient_is_computed() -> None:
    """Of linears that share an input, the last one in the backward pass knows the whole gradient of the input."""
    for order in call_on_ranks(order_on_rank, nproc=2):
        assert order == ["weight gradient", "sum starts", "weight gradient", "sum ends"]
