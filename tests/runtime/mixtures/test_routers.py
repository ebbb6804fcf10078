"""Routers are found, and their number of experts is that of their logits."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.plans.plan import Plan
from toolkit.recipe.model_section import Model
from toolkit.run_dir.trajectory import largest_difference
from toolkit.runtime.mixtures.routers import RouterTable, find_routers
from toolkit.runtime.models.tiny_models import drawn_sizes, tiny_of_type
from toolkit.runtime.proofs.coverage import REFERENCE, run_plan, settings
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure


@pytest.mark.parametrize(("kind", "without_weights"), [("mixtral", 0), ("zaya", 1), ("longcat_flash", 2)])
def test_experts_without_weights_are_counted(kind: str, without_weights: int) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_of_type(kind)))
    seen: list[torch.Tensor] = []
    for router in find_routers(model):
        router.module.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    model(input_ids=torch.arange(3, 19)[None], use_cache=False)
    assert {logits.shape[-1] for logits in seen} == {4 + without_weights}
    assert RouterTable.of(model).num_experts == 4 + without_weights


@pytest.mark.slow
def test_ranks_whose_tokens_visit_no_expert_without_weights_fetch_in_the_same_order() -> None:
    """With ZeRO 3; at these sizes only some ranks call LongCat's identity, and they waited for each other for ever."""
    sizes = drawn_sizes(random.Random("20261118 longcat_flash"), odd_width=True)
    section = Model(config=tiny_of_type("longcat_flash", sizes), init="scratch", precision="fp32")
    plan = Plan(strategy="zero", dp=2, zero_stage=3, zero_group=2, micro_batch=2, precision="fp32")
    train = settings(lora=False)
    (expected,), found = (
        call_on_ranks(run_plan, section, each, train, nproc=each.devices, timeout_seconds=60.0)
        for each in (REFERENCE, plan)
    )
    assert first_failure(found) is None, first_failure(found)
    assert largest_difference(expected.loss, found[0].loss) < 2e-5
