"""Where a pipeline is cut: against every possible cut of small models, and by hand for a real one."""

from __future__ import annotations

import itertools
import random

import pytest

from toolkit.plans.job import make_job, task_spec
from toolkit.plans.pipeline_bounds import balance, bounds_problem, crossing, even_bounds, layer_flops, pipeline_bounds
from toolkit.recipe.file import make_recipe
from toolkit.recipe.model_section import Model


def dearest(costs: list[float], bounds: tuple[int, ...], last: float) -> float:
    costs = [*costs[:-1], costs[-1] + last]
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))


def test_no_other_cut_has_a_cheaper_dearest_stage() -> None:
    dice = random.Random(0)
    for _ in range(300):
        layers = dice.randint(1, 8)
        stages = dice.randint(1, layers)
        costs, last = [dice.choice([0.3, 1.0, 2.0, 5.0]) for _ in range(layers)], dice.choice([0.0, 0.5, 4.0])
        bounds = balance(costs, stages, last=last)
        every = [(0, *cut, layers) for cut in itertools.combinations(range(1, layers), stages - 1)]
        assert bounds in every
        assert dearest(costs, bounds, last) <= min(dearest(costs, b, last) for b in every) * (1 + 1e-6)


def test_equal_layers_are_spread_evenly() -> None:
    assert even_bounds(8, 4) == (0, 2, 4, 6, 8)
    assert sorted(b - a for a, b in itertools.pairwise(even_bounds(7, 3))) == [2, 2, 3]


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    # 4 layers of cost 1 and a head of cost 2: 3 | 1 + 2.
    assert balance([1.0] * 4, 2, last=2.0) == (0, 3, 4)


def test_a_real_model_has_fewer_layers_beside_its_head() -> None:
    job = make_job(make_recipe({"model": {"path": "llama-3-8b"}, "train": {"steps": 1}, "cluster": {"device": "cpu"}}))
    bounds = pipeline_bounds(job.model, 4, 2048)
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    # The head's 128,256 × 4,096 matrix is worth 2.4 of the layers.
    assert sum(sizes) == 32
    assert sizes[-1] == min(sizes) == 7 - (sizes[0] == 9)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [((0, 3), "2 stages need 3"), ((1, 3, 6), "from 0 to"), ((0, 3, 5), "from 0 to"), ((0, 6, 6), "ascend")],
)
def test_bounds_of_a_recipe_are_checked(bounds: tuple[int, ...], words: str) -> None:
    problem = bounds_problem(bounds, layers=6, stages=2)
    assert problem is not None
    assert words in problem
    assert "[0, 3, 6]" in problem
    assert bounds_problem((0, 4, 6), layers=6, stages=2) is None


def test_decoder_layers_of_an_encoder_decoder_weigh_more_than_those_of_its_encoder() -> None:
    """BART large without its head: 12.6 and 16.8 million parameters a layer, so the encoder has more than half."""
    bart = task_spec({"model_type": "bart"}, Model(config={}, task="seq2seq"))
    costs = layer_flops(bart, 1)
    assert [round(cost / 1e6, 1) for cost in (costs[0], costs[12])] == [25.2, 33.6]
    assert balance(costs, 2) == (0, 14, 24)
    assert pipeline_bounds(bart, 2, 512, "interleaved", 2) == pipeline_bounds(bart, 4, 512)


@pytest.mark.parametrize(
    ("kind", "bound", "tensors"),
    [("bart", 6, 1), ("bart", 12, 1), ("bart", 18, 2), ("t5", 3, 1 + 4), ("t5", 6, 1), ("t5", 9, 2 + 4)],
)
def test_what_crosses_the_boundaries_of_an_encoder_decoder(kind: str, bound: int, tensors: float) -> None:
    """T5's bias has 8 heads × 512 × 512 elements, four times the hidden states of 2 × 512 tokens, 512 wide."""
    model = task_spec({"model_type": kind}, Model(config={}, task="seq2seq"))
    assert crossing(model, bound, micro_batch=2 if kind == "t5" else 1, seq_len=512) == tensors
