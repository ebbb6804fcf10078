"""Settings of the gradient reduction on real engines: each is in effect, and exact where it promises to be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import deepspeed.comm.comm as comm
import pytest
import torch

from tests.helpers.parallel import ONE, SGD, STEPS, assert_same, batch, micro_batches, model
from toolkit.plans.deepspeed_config import deepspeed_config
from toolkit.plans.plan import Plan
from toolkit.recipe.batch_sections import Reduce
from toolkit.recipe.schedules import make_schedule
from toolkit.recipe.sections import Train
from toolkit.run_dir.trajectory import Trajectory, largest_difference
from toolkit.runtime.build_engine import EngineSpec, build_engine
from toolkit.runtime.distributed.process_group import current_world
from toolkit.runtime.models.build import skeleton
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure

pytestmark = pytest.mark.slow  # dozens of engines; quick tests of each strategy are in test_training.py

TWO = Plan(strategy="data_parallel", dp=2, micro_batch=2, precision="fp32")
FOUR = Plan(strategy="data_parallel", dp=4, micro_batch=1, precision="fp32")


class Seen(NamedTuple):
    """A collective: what this rank brought in."""

    kind: str
    elements: int
    dtype: str
    norm: float


def as_rank(plan: Plan, train: Train, local_size: int) -> tuple[Trajectory, list[Seen]]:
    """A few steps; and every collective of gradients."""
    seen: list[Seen] = []
    for name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather_into_tensor"):
        _watch(name, seen)
    site = EngineSpec(
        model=model("llama"),
        train=train,
        plan=plan,
        deepspeed=deepspeed_config(plan, train, params=10**5, backend="cpu"),
        schedule=make_schedule(train, STEPS),
    )
    engine = build_engine(site, replace(current_world(), local_size=local_size))
    seen.clear()
    results = [engine.step(list(micro_batches(batch(s, "padded"), plan, engine.replica))) for s in range(STEPS)]
    found = Trajectory(tuple(float(r.loss) for r in results), tuple(r.grad_norm for r in results))
    return found, [item for item in seen if item.elements > 100]


def _watch(name: str, seen: list[Seen]) -> None:
    backend: Any = comm.cdb
    inner = getattr(backend, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        inputs = [kwargs.get("input_tensor"), kwargs.get("tensor"), *kwargs.get("input_list", []), *args]
        tensor = next(value for value in inputs if torch.is_tensor(value))
        seen.append(Seen(name, tensor.numel(), str(tensor.dtype), float(tensor.float().norm())))
        return inner(*args, **kwargs)

    setattr(backend, name, run)


def run(plan: Plan, section: Reduce | None = None, local_size: int = 2) -> tuple[Trajectory, list[Seen]]:
    train = replace(SGD, reduce=section or Reduce())
    results = call_on_ranks(as_rank, plan, train, local_size, nproc=plan.devices)
    failure = first_failure(results)
    assert failure is None, f"{failure.reason}\n{failure.details}"
    return results[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def alone() -> Trajectory:
    return run(ONE)[0]


def test_hierarchical_is_flat_and_sends_shards_between_hosts(alone: Trajectory) -> None:
    flat, before = run(FOUR)
    found, seen = run(FOUR, Reduce(algorithm="hierarchical"))
    assert_same(alone, found)
    assert largest_difference(flat.loss, found.loss) <= 1e-6
    whole = max(item.elements for item in before if item.kind == "all_reduce")
    assert max(item.elements for item in seen if item.kind == "all_reduce") == pytest.approx(whole / 2, abs=1)
    assert {item.kind for item in seen} == {"all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"}


def test_scaling_moves_the_division_and_changes_nothing_else(alone: Trajectory) -> None:
    sent = {}
    for name, section in {"post": Reduce(), "pre": Reduce(scaling="pre"), "part": Reduce(predivide=8.0)}.items():
        found, seen = run(TWO, section)
        assert_same(alone, found)
        sent[name] = seen[0].norm
    assert sent["post"] == pytest.approx(2 * sent["pre"]) == pytest.approx(8 * sent["part"])


@pytest.mark.parametrize("stage", [0, 2])
def test_small_buckets_change_nothing(alone: Trajectory, stage: int) -> None:
    plan = replace(TWO, zero_stage=stage, zero_group=2 if stage else 1)
    found, seen = run(plan, Reduce(bucket_elements=1000))
    assert_same(alone, found)
    assert len(seen) > 2 * STEPS


@pytest.mark.parametrize("stage", [0, 3])
def test_a_narrow_type_travels_and_rounds_a_little(alone: Trajectory, stage: int) -> None:
    plan = replace(TWO, zero_stage=stage, zero_group=2 if stage else 1)
    found, seen = run(plan, Reduce(dtype="bf16"))
    assert "torch.bfloat16" in {item.dtype for item in seen}
    assert 0 < largest_difference(alone.grad_norm, found.grad_norm) <= 1e-2
    assert largest_difference(alone.loss, found.loss) <= 1e-2


@pytest.mark.parametrize("stage", [1, 2])
def test_sharded_gradients_go_to_their_owners_only(alone: Trajectory, stage: int) -> None:
    plan = replace(FOUR, zero_stage=stage, zero_group=4)
    found, seen = run(plan, local_size=4)
    assert_same(alone, found)
    sums = [item for item in seen if "reduce" in item.kind]
    assert {item.kind for item in sums} == {"reduce"}
    everything = sum(parameter.numel() for parameter in skeleton(model("llama")).parameters())
    assert sum(item.elements for item in sums) <= STEPS * everything


ZERO_1 = replace(TWO, strategy="zero", zero_stage=1, zero_group=2, precision="bf16")


def test_zero_1_of_one_micro_batch_is_zero_2_bit_for_bit() -> None:
    assert run(ZERO_1)[0] == run(replace(ZERO_1, zero_stage=2))[0]


def held_gradients(plan: Plan, changes: dict[str, Any]) -> tuple[str, int, Trajectory]:
    """As one rank: the optimizer's class, 16-bit gradients that are left before the update, and the losses."""
    config = deepspeed_config(plan, SGD, params=10**5, backend="cpu")
    config["bf16"] |= changes
    spec = EngineSpec(model=model("llama"), train=SGD, plan=plan, deepspeed=config, schedule=make_schedule(SGD, STEPS))
    engine: Any = build_engine(spec, current_world())
    inner, left = engine._engine, []
    update = inner.optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        left.append(sum(p.grad is not None for p in engine.module.parameters()))
        return update(*args, **kwargs)

    inner.optimizer.step = step
    results = [engine.step(list(micro_batches(batch(s, "padded"), plan, engine.replica))) for s in range(STEPS)]
    losses = Trajectory(tuple(float(r.loss) for r in results), tuple(r.grad_norm for r in results))
    return type(inner.optimizer).__name__, max(left), losses


def test_zero_1_of_several_micro_batches_sums_in_fp32_and_frees_each_gradient() -> None:
    plan = replace(ZERO_1, micro_batch=1, grad_accum=2)
    own, late = (
        call_on_ranks(held_gradients, plan, changes, nproc=2)[0] for changes in ({}, {"immediate_grad_update": False})
    )
    assert own == ("BF16_Optimizer", 0, late[2])
    assert late[1] > 0, "DeepSpeed's default keeps them"
    one = call_on_ranks(held_gradients, replace(ZERO_1, micro_batch=2), {}, nproc=2)[0]
    assert one[:2] == ("DeepSpeedZeroOptimizer", 0)
