"""Shares of tokens between tensor-parallel regions: proven per type, exact on real processes, and small in memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.helpers.parallel import ONE, SGD, assert_same, model, run
from toolkit.plans import token_shares
from toolkit.plans.plan import Plan
from toolkit.plans.split_verdicts import Axes
from toolkit.recipe.model_section import Lora
from toolkit.runtime.data import samples
from toolkit.runtime.proofs.coverage import tiny_model
from toolkit.runtime.proofs.split_proof import prove
from toolkit.runtime.proofs.thread_ranks import ThreadGroup, thread_groups
from toolkit.runtime.sharding.token_collectives import enter_tokens, leave_tokens, linear_of_tokens

pytestmark = pytest.mark.slow

TWO = Plan(strategy="tensor_parallel", tp=2, micro_batch=2, grad_accum=2, precision="fp32", sequence_sharded=True)
SHARED = Axes(2, 1, 1, sequence_sharded=True)


@pytest.mark.parametrize(
    "kind",
    [
        "gpt2",  # fused, Conv1D
        "qwen3",  # fused, with norms of queries and keys inside
        "bloom",  # the residual is added inside the block
        "opt",  # the pair of the MLP are the layer's own children
        "bert",  # pairs spread over children, with a norm behind each
        "mixtral",  # experts are wrapped
        "olmo2",  # attention is wrapped
    ],
)
def test_every_kind_of_block_is_exact(kind: str) -> None:
    verdict = prove(tiny_model(kind), SHARED)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_adapters_are_exact(kind: str) -> None:
    verdict = prove(replace(tiny_model(kind), lora=Lora(rank=4)), SHARED)
    assert verdict.ok, verdict.reason


def test_a_type_that_adds_a_bias_to_shares_is_refused_by_name() -> None:
    verdict = prove(tiny_model("gpt_neox_japanese"), SHARED)
    assert "dense_bias" in verdict.reason
    assert prove(tiny_model("gpt_neox_japanese"), replace(SHARED, sequence_sharded=False)).ok


@pytest.mark.parametrize(
    ("data", "changes"),
    [
        ("padded", {"zero_stage": 1}),
        ("packed", {"recompute": "full"}),
        ("packed", {"recompute": "selective", "zero_stage": 2}),
    ],
)
def test_real_ranks_train_as_one_process(data: str, changes: dict[str, object]) -> None:
    section = model("llama")
    assert_same(run(section, ONE, SGD, data), run(section, replace(TWO, **changes), SGD, data), loss=1e-6, norm=2e-6)


@pytest.mark.parametrize(("kind", "recompute"), [("llama", "full"), ("gpt2", "none")])
def test_stages_send_shares(kind: str, recompute: str) -> None:
    section = model(kind)
    plan = replace(
        TWO, strategy="hybrid", pp=2, micro_batch=1, grad_accum=4, zero_stage=1, recompute=recompute,
        pipeline_bounds=(0, 2, 4),
    )  # fmt: skip
    assert_same(run(section, ONE, SGD, "packed"), run(section, plan, SGD, "packed"), loss=1e-6, norm=2e-6)


def test_replicas_under_zero_3() -> None:
    section = model("qwen3")
    plan = replace(TWO, dp=2, grad_accum=1, zero_stage=3, zero_group=2)
    assert_same(run(section, ONE, SGD), run(section, plan, SGD), loss=1e-6, norm=2e-6)


def _region(
    group: ThreadGroup, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> tuple[list[int], torch.Tensor]:
    """(elements of every tensor that a column and a row matrix keep, the gradient of the share)."""
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    share = x.chunk(2, 1)[group.index].clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        inner = linear_of_tokens(enter_tokens(share, group), up.chunk(2, 0)[group.index].requires_grad_(), None)
        y = leave_tokens(torch.nn.functional.linear(inner, down.chunk(2, 1)[group.index].requires_grad_()), group)
    y.square().sum().backward()
    assert share.grad is not None
    return kept, share.grad


def test_gathered_tokens_are_not_kept_for_the_backward_pass() -> None:
    x, up, down = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 8, 16), (4, 16), (16, 4)))
    whole = x.clone().requires_grad_()
    (whole @ up.t() @ down.t()).square().sum().backward()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda group: _region(group, x, up, down), thread_groups(2)))
    torch.testing.assert_close(torch.cat([gradient for _, gradient in found], 1), whole.grad)
    assert all(max(kept) <= x.numel() // 2 for kept, _ in found)


def test_the_planner_knows_how_long_padded_rows_are() -> None:
    assert token_shares.ROUND == samples.ROUND
