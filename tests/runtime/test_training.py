"""Real DeepSpeed engines in real processes: every strategy gives one process's loss and gradient norm."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import Finished, Trainer
from toolkit.sessions.parity import largest_difference

LOSS, NORM = 1e-5, 1e-4


Check = Callable[..., None]


@pytest.fixture
def assert_same(train: Trainer, references: dict[tuple[str, ...], Finished]) -> Check:
    """`assert_same(*overrides, base=(), nproc=2)`: a run with the overrides against one process of the same job."""

    def check(*overrides: str, base: tuple[str, ...] = (), nproc: int = 2) -> None:
        if base not in references:
            references[base] = train(*base, "strategy.name=data_parallel", nproc=1)
        compare(references[base], train(*base, *overrides, nproc=nproc))

    return check


def compare(one: Finished, other: Finished) -> None:
    assert len(one.losses) == 4
    assert largest_difference(one.losses, other.losses) <= LOSS
    assert largest_difference(one.norms, other.norms) <= NORM


@pytest.mark.parametrize(
    "overrides",
    [
        ("strategy.name=data_parallel",),
        ("strategy.name=data_parallel", "strategy.micro_batch=1"),
        ("strategy.name=data_parallel", "strategy.recompute=full"),
        ("strategy.name=zero", "strategy.zero_stage=1"),
        ("strategy.name=zero", "strategy.zero_stage=2", "strategy.micro_batch=2"),
        ("strategy.name=zero", "strategy.zero_stage=3", "strategy.micro_batch=1"),
        ("strategy.name=zero", "strategy.zero_stage=1", "strategy.offload=cpu"),
        ("strategy.name=zero", "strategy.zero_stage=2", "strategy.offload=cpu"),
        ("strategy.name=zero", "strategy.zero_stage=3", "strategy.offload=cpu_params", "strategy.recompute=full"),
    ],
    ids=lambda o: "+".join(part.split("=")[1] for part in o),
)
def test_strategies_are_loss_identical(assert_same: Check, overrides: tuple[str, ...]) -> None:
    assert_same(*overrides)


@pytest.mark.slow
def test_hpz_on_four_processes(assert_same: Check) -> None:
    axes = ("strategy.name=zero", "strategy.zero_stage=3", "strategy.zero_variant=hpz", "strategy.zero_group=2")
    assert_same(*axes, nproc=4)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_uneven_token_counts_weigh_alike(assert_same: Check, stage: int) -> None:
    """Without packing, replicas count different numbers of tokens: a mean of means would be off by percents."""
    name = "zero" if stage else "data_parallel"
    base = ("data.packing=false", "data.seq_len=64")
    assert_same(f"strategy.name={name}", f"strategy.zero_stage={stage}", "strategy.micro_batch=1", base=base)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tight_clipping_under_sgd(assert_same: Check, stage: int) -> None:
    """Adam hides a wrong scale of gradients; SGD with a clip that always bites does not."""
    name = "zero" if stage else "data_parallel"
    base = ("train.optimizer=sgd", "train.lr=1.0", "train.grad_clip=0.05")
    assert_same(f"strategy.name={name}", f"strategy.zero_stage={stage}", base=base)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_no_clipping(assert_same: Check, stage: int) -> None:
    name = "zero" if stage else "data_parallel"
    assert_same(f"strategy.name={name}", f"strategy.zero_stage={stage}", base=("train.grad_clip=0",))


def test_sum_of_gradients_is_the_batch_times_the_mean(train: Trainer) -> None:
    base = ("train.optimizer=sgd", "train.steps=1", "train.grad_clip=0")
    mean = train("strategy.name=data_parallel", *base)
    total = train("strategy.name=zero", "strategy.zero_stage=2", "train.grad_reduce=sum", *base)
    assert total.norms[0] == pytest.approx(8 * mean.norms[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_stays_near_fp32(train: Trainer, references: dict[tuple[str, ...], Finished], stage: int) -> None:
    name = "zero" if stage else "data_parallel"
    exact = references.setdefault((), train("strategy.name=data_parallel", nproc=1))
    rough = train(f"strategy.name={name}", f"strategy.zero_stage={stage}", "model.precision=bf16")
    assert largest_difference(exact.losses, rough.losses) <= 2e-2
    assert rough.losses != exact.losses


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_lora_trains_adapters_alike(assert_same: Check, stage: int) -> None:
    name = "zero" if stage else "data_parallel"
    assert_same(f"strategy.name={name}", f"strategy.zero_stage={stage}", base=("model.lora={rank: 4}",))


def test_a_seed_fixes_the_run(train: Trainer) -> None:
    axes = ("strategy.name=zero", "strategy.zero_stage=2")
    assert train(*axes).losses == train(*axes).losses
    assert train(*axes).losses != train(*axes, "train.seed=1").losses


def test_the_loss_falls_and_is_recorded(train: Trainer) -> None:
    done = train("train.steps=30", "strategy.name=zero", "strategy.zero_stage=1", "data.packing_method=stream")
    assert done.losses[0] == pytest.approx(5.6, abs=0.3)
    assert done.losses[-1] < 0.7 * done.losses[0]
    record, summary = done.records[-1], done.summary
    rates = ("step_seconds", "tokens_per_second", "mfu", "memory_bytes", "comm_seconds")
    for key in ("step", "loss", "lr", "grad_norm", "tokens", *rates):
        assert record[key] > 0, key
    assert record["tokens"] == 8 * 32
    assert (summary["status"], summary["steps"]) == ("done", 30)
    assert summary["tokens"] == 30 * 8 * 32
    assert summary["final_loss"] == done.losses[-1]
    assert summary["predicted"].keys() == summary["measured"].keys() == {"step_seconds", "memory_bytes"}
    # All states of a tiny model, and at least its weights, gradients and one moment, are live at the peak.
    params = 264 * 32 * 2 + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 64) + 32
    assert 3 * 4 * params < summary["measured"]["memory_bytes"] < 40 * 4 * params


def test_warmup_and_learning_rate_are_those_of_the_schedule(train: Trainer) -> None:
    done = train("train.steps=8", "train.warmup=4", "train.schedule=constant", "train.lr=0.008")
    assert [r["lr"] for r in done.records] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.008, 0.008, 0.008, 0.008])


@pytest.mark.slow
def test_epochs_become_steps(train: Trainer) -> None:
    one = train("train={global_batch: 8, epochs: 1}")
    two = train("train={global_batch: 8, epochs: 2}")
    assert abs(2 * len(one.losses) - len(two.losses)) <= 1
    assert len(one.losses) > 4


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_numbers_gone_bad_stop_the_run(train: Trainer, stage: int) -> None:
    """Under ZeRO the loss may stay finite while every update is skipped: the gradient norm tells."""
    name = f"strategy.name={'zero' if stage else 'data_parallel'}"
    broken = ("train.lr=1e30", "train.grad_clip=0", "train.optimizer=sgd", "train.steps=20")
    done = train(name, f"strategy.zero_stage={stage}", *broken, check=False)
    assert set(done.codes) == {5}
    assert done.summary["status"] == "loss_not_finite"
    assert len(done.records) < 20
