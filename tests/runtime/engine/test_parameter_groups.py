"""Learning rates and weight decay of single parameters: the same updates under every strategy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.parallel import ADAM, ONE, assert_same, model, run
from toolkit.errors import BadInput
from toolkit.plans.plan import Plan
from toolkit.recipe.file import make_recipe
from toolkit.recipe.model_section import Lora
from toolkit.recipe.sections import Train
from toolkit.run_dir.trajectory import Trajectory, largest_difference
from toolkit.runtime.engine.parameter_groups import parameter_groups, with_adapter_rate

pytestmark = pytest.mark.slow

DECAYING = replace(ADAM, lr=0.003, weight_decay=0.5, lr_multipliers={"*wte*": 0.25})
ZERO = Plan(strategy="zero", dp=2, zero_group=2, micro_batch=2, precision="fp32")
PIPELINE = Plan(
    strategy="pipeline", pp=2, zero_stage=1, micro_batch=2, grad_accum=2, precision="fp32", pipeline_bounds=(0, 2, 4)
)
PLANS = {
    "data parallel": Plan(strategy="data_parallel", dp=2, micro_batch=2, precision="fp32"),
    "ZeRO 1": replace(ZERO, zero_stage=1),
    "ZeRO 2": replace(ZERO, zero_stage=2),
    "ZeRO 3": replace(ZERO, zero_stage=3),
    "tensor": Plan(strategy="tensor_parallel", tp=2, zero_stage=1, micro_batch=4, precision="fp32"),
    "pipeline": PIPELINE,
    "pipeline, embeddings in two of its stages": replace(
        PIPELINE, pp=4, micro_batch=1, grad_accum=4, pipeline_bounds=(0, 1, 2, 3, 4)
    ),
}


@pytest.fixture(scope="module")
def expected() -> Trajectory:
    """One process's losses and norms."""
    return run(model("gpt2"), ONE, DECAYING)


def named(**shapes: tuple[int, ...]) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]


def test_without_settings_of_their_own_parameters_are_one_list() -> None:
    given = named(weight=(2, 2), norm=(2,))
    assert parameter_groups(given, Train(), 0.1) == [parameter for _, parameter in given]
    given[0][1].requires_grad_(False)
    assert parameter_groups(given, Train(), 0.1) == [given[1][1]]


def test_norms_and_biases_do_not_decay_unless_asked_for() -> None:
    given = named(norm=(2,), weight=(2, 2))
    groups = parameter_groups(given, Train(weight_decay=0.1), 0.1)
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.1, 1), (0.0, 1)]
    assert parameter_groups(given, Train(weight_decay=0.1, decay="all"), 0.1) == [p for _, p in given]


def test_the_first_pattern_counts_and_the_recipes_own_rate_is_reported() -> None:
    given = named(head=(2, 2), body=(2, 2), other=(2, 2))
    groups = parameter_groups(given, Train(lr_multipliers={"h*": 2.0, "*ea*": 3.0, "b*": 0.5}), 0.1)
    assert [group["lr"] for group in groups] == pytest.approx([0.1, 0.2, 0.05])


def test_second_matrices_of_adapters_learn_faster() -> None:
    train = with_adapter_rate(Train(), Lora(lr_ratio=16.0))
    groups = parameter_groups(
        named(**{"a.lora_A.default.weight": (2, 2), "a.lora_B.default.weight": (2, 2)}), train, 0.1
    )
    assert [group["lr"] for group in groups] == pytest.approx([0.1, 1.6])
    assert with_adapter_rate(train, Lora()) is train


@pytest.mark.parametrize("name", PLANS)
def test_every_strategy_updates_as_one_process(name: str, expected: Trajectory) -> None:
    section = model("gpt2")  # it has biases and a table of positions
    assert_same(expected, run(section, PLANS[name], DECAYING))


def test_decay_and_multipliers_change_the_gradient_norms(expected: Trajectory) -> None:
    """By more than the comparison of strategies allows, or it would not see them."""
    for other in (replace(DECAYING, decay="all"), replace(DECAYING, lr_multipliers={})):
        assert largest_difference(expected.grad_norm, run(model("gpt2"), ONE, other).grad_norm) > 1e-3


@pytest.mark.parametrize("name", ["ZeRO 2", "data parallel"])
def test_layerwise_optimizers_have_groups_too(name: str) -> None:
    section, train = model("gpt2"), replace(DECAYING, optimizer="lamb")
    one, all_decay = run(section, ONE, train), run(section, ONE, replace(train, decay="all"))
    assert one.loss[-1] != all_decay.loss[-1]
    assert_same(one, run(section, PLANS[name], train))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr_multipliers={'*': 0}", r"train\.lr_multipliers\.\*: 0 given"),
        ("train.cycles=3", r"train\.cycles: unused with schedule cosine"),
        ("train.decay_fraction=0.1", r"train\.decay_fraction: unused with schedule cosine"),
    ],
)
def test_bad_rates_are_named(override: str, message: str) -> None:
    given = {"model": {"config": {"model_type": "llama"}}, "train": {"steps": 1}}
    with pytest.raises(BadInput, match=message):
        make_recipe(given, [override])
