"""A batch that grows on real engines: one process's losses under every stage, and across a resumption."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Trainer
from toolkit.checkpoints import store
from toolkit.sessions.parity import largest_difference

RAMP = (
    "train.steps=7",
    "train.batch_ramp={start: 2, stage_steps: 2}",
    "train.lr_scaling=sqrt",
    "train.base_batch=4",
    "checkpoint.every=3",
    "checkpoint.keep=9",
)


@pytest.mark.slow
def test_every_stage_grows_like_one_process_and_goes_on(train: Trainer, tmp_path: Path) -> None:
    alone = train(*RAMP, "strategy.name=data_parallel", "strategy.micro_batch=1", nproc=1)
    tokens = [record["tokens"] for record in alone.records]
    assert tokens == pytest.approx([n * tokens[0] / 2 for n in (2, 2, 4, 4, 8, 8, 8)], rel=0.1)
    for stage in (0, 2, 3):
        name = "zero" if stage else "data_parallel"
        axes = (f"strategy.name={name}", f"strategy.zero_stage={stage}")
        found = train(*RAMP, *axes, into=tmp_path / f"stage-{stage}")
        assert largest_difference(alone.losses, found.losses) < 1e-5
        assert largest_difference(alone.norms, found.norms) < 1e-4
    saved = store.path_of(tmp_path / "stage-2" / "checkpoints", 3)
    rest = train(*RAMP, "strategy.name=data_parallel", f"checkpoint.resume={saved}", nproc=1)
    assert largest_difference(alone.losses[3:], rest.losses) < 1e-5


@pytest.mark.slow
def test_sums_and_16_bits_grow_too(train: Trainer) -> None:
    base = ("train.steps=3", "train.batch_ramp={start: 2, stage_steps: 1}", "train.grad_clip=0")
    axes = ("strategy.name=zero", "strategy.zero_stage=1", "model.precision=bf16")
    mean, total = train(*base, *axes), train(*base, *axes, "train.grad_reduce=sum", "train.lr=1e-9")
    assert total.norms[0] == pytest.approx(2 * mean.norms[0], rel=1e-2)
    assert mean.losses[-1] < mean.losses[0]
