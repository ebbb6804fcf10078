"""8-bit and bf16 states: the codes, the same states on every number of ranks, losses near fp32, bytes, resuming."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Trainer
from tests.helpers.parallel import ADAM, ONE, TOKENS, assert_same, batch, engine_of, micro_batches, model, run
from toolkit.checkpoints import element_runs, store
from toolkit.checkpoints.element_runs import StridedRange
from toolkit.cost.memory import memory
from toolkit.plans.job import make_job
from toolkit.plans.plan import Plan
from toolkit.recipe.file import make_recipe
from toolkit.recipe.optimizer_sections import Ema
from toolkit.recipe.sections import Train
from toolkit.run_dir.trajectory import Trajectory, largest_difference
from toolkit.runtime.engine.training_state import DeepSpeedState
from toolkit.runtime.optimizers.packed_states import BLOCK, Piece, blocks, code_values, cut_blocks, rounded
from toolkit.runtime.optimizers.update_rules import State
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure

pytestmark = pytest.mark.slow

LAYOUTS = {
    "zero 1": Plan(strategy="zero", dp=2, micro_batch=2, zero_stage=1, zero_group=2, precision="fp32"),
    "zero 3": Plan(strategy="zero", dp=2, micro_batch=2, zero_stage=3, zero_group=2, precision="fp32"),
    "pp": Plan(strategy="pipeline", pp=2, micro_batch=1, grad_accum=4, precision="fp32"),
}


WIDE = model("llama", hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=4, head_dim=64)


def settings(states: str) -> Train:
    return replace(ADAM, states=states, weight_decay=0.1)  # type: ignore[arg-type]


@functools.cache
def alone(states: str) -> Trajectory:
    """One process."""
    return run(model("llama"), ONE, settings(states))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_bitsandbytes_with_minus_one(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.create_dynamic_map(signed=signed)
    assert torch.allclose(code_values(signed)[1:], theirs[1:])
    assert code_values(signed)[0] == (-1.0 if signed else 0.0)


def stored(values: torch.Tensor, pieces: list[Piece], state: State | None = None) -> torch.Tensor:
    """Values after they were stored in 8 bits and loaded again, by one rank."""
    packing = blocks(pieces, [], lambda table: table, torch.device("cpu"))
    kept: State = {} if state is None else state
    found = torch.zeros_like(values)
    for place, where in enumerate(packing.places()):
        packing.save(kept, {"exp_avg": values[where]}, place, 1)
        found[where] = packing.load(kept, "exp_avg", place)
    return found


def test_storing_twice_changes_nothing_and_errors_are_small() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    pieces = [Piece("a", 0, element_runs.flat(0, 300)), Piece("b", 300, element_runs.flat(0, 700))]
    once = stored(values, pieces)
    assert torch.equal(stored(once, pieces), once)
    assert (once - values).abs().max() < 0.05 * values.abs().max()
    assert torch.equal(once.abs().amax(), values.abs().amax())


def test_a_block_that_is_cut_between_ranks_has_one_scale() -> None:
    values = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    whole = stored(values, [Piece("a", 0, element_runs.flat(0, 1024))])
    regions = [element_runs.flat(0, 300), element_runs.flat(300, 1024)]
    cut = sorted(cut_blocks("a", regions))
    assert cut == [("a", 1)]
    scale = values[BLOCK : 2 * BLOCK].abs().amax()
    parts = []
    for region in regions:
        own = values[region[0].start : region[0].end]
        packing = blocks([Piece("a", 0, region)], cut, lambda table: torch.full_like(table, scale), torch.device("cpu"))
        state: State = {}
        found = torch.zeros_like(own)
        for place, where in enumerate(packing.places()):
            packing.save(state, {"exp_avg": own[where]}, place, 1)
            found[where] = packing.load(state, "exp_avg", place)
        parts.append(found)
    assert torch.equal(torch.cat(parts), whole)


def test_rounding_is_right_on_average_and_depends_on_the_element_alone() -> None:
    values = torch.full((4096,), 1.0 + 1 / 1024)
    whole = rounded([Piece("a", 0, element_runs.flat(0, 4096))])
    state: State = {}
    whole.save(state, {"exp_avg": values}, 0, 7)
    found = whole.load(state, "exp_avg", 0)
    assert set(found.tolist()) == {1.0, 1.0 + 1 / 128}
    assert float(found.mean()) == pytest.approx(float(values.mean()), abs=3e-4)
    columns = rounded([Piece("a", 0, (StridedRange(32, 32, 64, 64),))])
    other: State = {}
    columns.save(other, {"exp_avg": values[:2048]}, 0, 7)
    assert torch.equal(columns.load(other, "exp_avg", 0), found.view(64, 64)[:, 32:].reshape(-1))


@pytest.mark.parametrize("states", ["8bit", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_result_of_one_process(states: str, layout: str) -> None:
    assert_same(alone(states), run(model("llama"), LAYOUTS[layout], settings(states)))


@pytest.mark.parametrize(("states", "most"), [("8bit", 1e-3), ("bf16", 1e-5)])
def test_blocks_of_tensor_shards_differ_little_and_rounding_does_not(states: str, most: float) -> None:
    """The tiny model's columns are not cut at multiples of 256."""
    shards = Plan(strategy="tensor_parallel", tp=2, micro_batch=4, precision="fp32")
    assert_same(alone(states), run(model("llama"), shards, settings(states)), loss=most, norm=1e-2)


@pytest.mark.parametrize("states", ["8bit", "bf16"])
def test_losses_stay_near_those_of_fp32(states: str) -> None:
    exact = run(model("llama"), ONE, settings("fp32"))
    assert 0 < largest_difference(exact.loss, alone(states).loss) < 5e-3


@pytest.mark.parametrize(("before", "after"), [("8bit", "8bit"), ("bf16", "fp32"), ("fp32", "8bit")])
def test_states_are_resumed_in_any_form(before: str, after: str, train: Trainer, tmp_path: Path) -> None:
    base = ("train.steps=6", "checkpoint.every=3")
    whole = train(*base, f"train.states={before}", "strategy.name=data_parallel", nproc=1)
    part = train(*base, f"train.states={before}", "strategy.name=zero", "strategy.zero_stage=2", into=tmp_path / "part")
    saved = store.path_of(part.run.checkpoints, 3)
    resumed = (f"train.states={after}", f"checkpoint.resume={saved}", "strategy.name=data_parallel")
    rest = train(*base, *resumed, nproc=1, into=tmp_path / "rest")
    assert largest_difference(whole.losses[3:], rest.losses) < (1e-5 if before == after else 2e-2)


def state_bytes_as_rank(plan: Plan, train: Train) -> int:
    """Bytes of masters and states after a step."""
    engine = engine_of(WIDE, plan, train)
    engine.step(list(micro_batches(batch(0, "full"), plan, engine.replica)))
    state = engine.state
    assert isinstance(state, DeepSpeedState)
    return sum(master.nbytes for master, _ in state.masters()) + _bytes(dict(state.base.state))


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_bytes, value.values())) if isinstance(value, dict) else 0


@pytest.mark.parametrize(
    ("settings", "per_parameter"), [({"states": "8bit"}, 6.03), ({"states": "bf16"}, 8.0), ({"ema": Ema()}, 16.0)]
)
def test_bytes_are_those_that_the_planner_predicts(settings: dict[str, Any], per_parameter: float) -> None:
    train = replace(ADAM, **settings)
    given = {"config": WIDE.config, "precision": "fp32"}
    recipe = make_recipe({"model": given, "data": {"seq_len": TOKENS}, "train": {"steps": 1}})
    job = make_job(replace(recipe, train=train), 2)
    plan = LAYOUTS["zero 1"]
    predicted = memory(plan, job).optimizer
    results = call_on_ranks(state_bytes_as_rank, plan, train, nproc=2)
    failure = first_failure(results)
    assert failure is None, f"{failure.reason}\n{failure.details}"
    assert predicted == pytest.approx(per_parameter * job.model.params / 2, rel=1e-3)
    assert max(results) == pytest.approx(predicted, rel=0.01)
