"""Numbers of a step that are read one step late, as on accelerators: the same records, and nothing bad is saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.harness.self_killing import poison
from tests.conftest import Trainer
from tests.helpers.parallel import ADAM, batch, micro_batches, model, run, train_as_rank
from toolkit.checkpoints import store
from toolkit.plans.deepspeed_config import deepspeed_config
from toolkit.plans.plan import Plan
from toolkit.recipe.schedules import make_schedule
from toolkit.recipe.sections import Train
from toolkit.run_dir.trajectory import Trajectory
from toolkit.runtime.supervision.warm_pool import call_on_ranks, enter_worker

pytestmark = pytest.mark.slow  # dozens of engines; quick tests of each strategy are in test_training.py

THREE = Plan(strategy="zero", dp=2, zero_stage=3, zero_group=2, micro_batch=2, precision="bf16")
ZERO = ("strategy.name=zero", "strategy.zero_stage=2")


def read_late(argv: tuple[str, ...], env: dict[str, str]) -> None:
    _read_late()
    enter_worker(argv, env)


def poisoned_and_read_late(argv: tuple[str, ...], env: dict[str, str]) -> None:
    _read_late()
    poison(argv, env)


def _read_late() -> None:
    from toolkit.runtime import loop

    make: Any = loop.Loop.__init__
    loop.Loop.__init__ = lambda self, **parts: make(self, **{**parts, "reads_late": True})  # type: ignore[method-assign]


def test_late_reads_change_no_record_and_no_checkpoint(train: Trainer) -> None:
    settings = (*ZERO, "train.steps=7", "checkpoint.every=3", "metrics.detail_every=4")
    at_once, late = train(*settings), train(*settings, enter=read_late)
    assert (late.losses, late.norms) == (at_once.losses, at_once.norms)
    assert [record["step"] for record in late.records] == [1, 2, 3, 4, 5, 6, 7]
    assert store.steps(late.run.checkpoints) == store.steps(at_once.run.checkpoints)
    assert all(record["step_seconds"] > 0 for record in late.records)


def test_a_bad_step_is_found_before_the_next_one_is_saved(train: Trainer) -> None:
    """Step 3 is bad, step 4 has run when that is read, and step 4 is due to be saved."""
    done = train(*ZERO, "train.steps=9", "checkpoint.every=4", enter=poisoned_and_read_late, check=False)
    assert done.codes == [5, 5]
    assert store.steps(done.run.checkpoints) == []
    assert "at step 3, from rank 1" in done.run.log(0).read_text()


def weights_after_bad_steps(plan: Plan, optimizer: Any) -> tuple[bool, bool, float]:
    """(whether a step with infinite gradients left the weights alone, whether they are finite, its norm)."""
    from toolkit.runtime.build_engine import EngineSpec, build_engine
    from toolkit.runtime.distributed.process_group import current_world
    from toolkit.runtime.engine.replica import ReplicaEngine

    train = Train(global_batch=plan.global_batch, steps=3, lr=1e-2, optimizer=optimizer, warmup=0.0)
    config = deepspeed_config(plan, train, params=10**6, backend="cpu")
    spec = EngineSpec(model=model("llama"), train=train, plan=plan, deepspeed=config, schedule=make_schedule(train, 3))
    engine = build_engine(spec, current_world())
    assert isinstance(engine, ReplicaEngine)

    def step(number: int) -> float:
        return engine.step(list(micro_batches(batch(number, "full"), plan, engine.replica))).grad_norm

    def weights() -> torch.Tensor:
        return torch.cat([held.master.detach().flatten() for _, held in engine.state.held()]).clone()

    step(0)
    before = weights()
    spoiled = [p.register_hook(lambda gradient: gradient * float("inf")) for p in engine.module.parameters()]
    norm = step(1)
    after = weights()
    for hook in spoiled:
        hook.remove()
    assert step(2) < float("inf")
    return torch.equal(before, after), bool(torch.isfinite(after).all()), norm


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        (Plan(strategy="data_parallel", micro_batch=4, precision="fp32"), "adamw"),
        (Plan(strategy="data_parallel", micro_batch=4, precision="bf16"), "adamw"),
        (Plan(strategy="zero", zero_stage=1, micro_batch=2, grad_accum=2, precision="bf16"), "adamw"),
        (Plan(strategy="zero", zero_stage=2, micro_batch=4, precision="fp32"), "adamw"),
        (Plan(strategy="zero", zero_stage=3, micro_batch=4, precision="bf16"), "adamw"),
        (Plan(strategy="zero", zero_stage=2, micro_batch=4, precision="fp32"), "lion"),
    ],
)
def test_an_update_with_infinite_gradients_is_skipped_on_the_device(plan: Plan, optimizer: str) -> None:
    ((unchanged, finite, norm),) = call_on_ranks(weights_after_bad_steps, plan, optimizer, nproc=1)
    assert not norm < float("inf")
    assert finite
    assert unchanged or optimizer != "adamw"


def train_as_on_a_device() -> tuple[Trajectory, int]:
    """ZeRO 3 with the gathers that are installed where the host must not wait, and how often they were used."""
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle

    from toolkit.runtime.engine import host_waits

    calls: list[int] = []
    wait = AllGatherCoalescedHandle.wait

    def counted(self: Any, **options: Any) -> None:
        calls.append(1)
        wait(self, **options)

    AllGatherCoalescedHandle.wait = counted
    host_waits.let_streams_wait = lambda engine, plan: host_waits.gather_persistent(engine.optimizer)
    return train_as_rank(model("llama"), THREE, ADAM, "full"), len(calls)


def test_persistent_parameters_are_gathered_without_a_wait() -> None:
    expected = run(model("llama"), THREE)
    for found, calls in call_on_ranks(train_as_on_a_device, nproc=2):
        assert found == expected
        assert calls == len(found.loss)
