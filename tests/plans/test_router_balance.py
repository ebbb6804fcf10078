"""How routers are balanced: the recipe's word, else the config's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from toolkit.errors import BadInput
from toolkit.plans.job import make_job
from toolkit.plans.router_balance import (
    BALANCED_LOAD,
    BIASED_LOAD,
    WEIGHT,
    Balance,
    balance_lines,
    balance_of,
)
from toolkit.recipe.file import make_recipe
from toolkit.recipe.objective_sections import Router

MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 264, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 264, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("section", "config", "expected"),
    [
        (None, {}, Balance()),
        (None, {"router_aux_loss_coef": 0.02}, Balance(loss="sequence", weight=0.02, asked=0.02)),
        (None, {"text_config": {"aux_loss_alpha": 0.1}}, Balance(loss="sequence", weight=0.1, asked=0.1)),
        (None, {"output_router_logits": True}, Balance(loss="sequence", weight=WEIGHT, asked=WEIGHT)),
        (Router(loss="none"), {"router_aux_loss_coef": 0.02}, Balance(asked=0.02)),
        (Router(loss="micro_batch"), {}, Balance(loss="micro_batch", weight=WEIGHT)),
        (Router(weight=0.5), {"router_aux_loss_coef": 0.02}, Balance(loss="sequence", weight=0.5, asked=0.02)),
        (Router(bias_update=0.001), {}, Balance(bias_update=0.001)),
        (None, {"router_z_loss_coef": 0.01}, Balance(z_loss=0.01)),
        (Router(z_loss=0.0), {"router_z_loss_coef": 0.01}, Balance()),
    ],
)
def test_the_recipe_decides_and_then_the_config(section: Router | None, config: Any, expected: Balance) -> None:
    load = BIASED_LOAD if expected.bias_update else BALANCED_LOAD
    assert balance_of(section, config) == replace(expected, max_over_mean=load)


@pytest.mark.parametrize(
    ("section", "load"),
    [
        (Router(max_over_mean=2.0, bias_update=0.001), 2.0),
        (Router(capacity_factor=1.2), 1.2),
        (Router(capacity_factor=1.2, max_over_mean=1.1), 1.1),
    ],
)
def test_the_planner_takes_the_given_load_and_no_more_than_the_capacity(section: Router, load: float) -> None:
    assert balance_of(section, {}).max_over_mean == load


def test_a_loss_that_is_turned_off_is_a_line_of_the_plan() -> None:
    (line,) = balance_lines(balance_of(Router(loss="none"), {"router_aux_loss_coef": 0.02}))
    assert "asks for a router loss of weight 0.02" in line
    (line,) = balance_lines(balance_of(Router(loss="micro_batch"), {}))
    assert "depends on micro_batch" in line
    (line,) = balance_lines(balance_of(Router(capacity_factor=1.5), {}))
    assert "capacity_factor 1.5" in line
    assert "differs" in line
    (line,) = balance_lines(balance_of(Router(capacity_factor=4.0), {}), experts_per_visit=4.0)
    assert "nothing is dropped" in line
    assert not list(balance_lines(Balance()))
    assert not list(balance_lines(Balance(), experts_per_visit=0.0)), "a dense model"


@pytest.mark.parametrize(
    ("config", "overrides", "words"),
    [
        (LLAMA, ["train.router.loss=sequence"], "the model has no experts"),
        (LLAMA, ["strategy.ep=2"], "llama has no experts: it is dense"),
        (MIXTRAL, ["strategy.ep=3"], "3 given; it must divide the 4 experts; use 2, 4"),
        (MIXTRAL, ["train.router={loss: none, weight: 0.1}"], "unused with loss none"),
        (MIXTRAL, ["train.router.loss=sequence", "model.precision=fp16"], "do not follow fp16's loss scale"),
        (MIXTRAL, ["train.router.weight=0"], "train.router.weight"),
        (MIXTRAL, ["train.router.capacity_factor=0.9"], "0.9 given; at least 1 is required"),
        (LLAMA, ["train.router.capacity_factor=2"], "the model has no experts"),
    ],
)
def test_bad_input_names_the_key_and_the_way_out(config: Any, overrides: list[str], words: str) -> None:
    given = {
        "name": "tiny",
        "model": {"config": config, "precision": "fp32"},
        "data": {"path": "synthetic", "seq_len": 32},
        "train": {"global_batch": 8, "steps": 4},
        "cluster": {"device": "A100-SXM4-80GB", "nodes": 1, "devices_per_node": 4},
    }
    with pytest.raises(BadInput) as raised:
        make_job(make_recipe(given, overrides))
    assert words in str(raised.value)
