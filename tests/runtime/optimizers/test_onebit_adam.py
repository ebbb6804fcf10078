"""1-bit Adam: what travels, that nothing is lost for good, and real runs before and after the warm-up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import Trainer
from toolkit.checkpoints import store
from toolkit.errors import BadInput
from toolkit.plans.plan import BLOCK, ONE_BIT_BYTES
from toolkit.runtime.optimizers.onebit_adam import compressed, expanded
from toolkit.sessions.parity import largest_difference

ADAM = ("train.grad_clip=0", "train.lr=3e-3", "strategy.name=data_parallel")
ONE_BIT = (*ADAM, "train.optimizer=onebit_adam")


def test_a_block_keeps_signs_and_mean_size_and_tells_the_rest() -> None:
    values = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(0))
    rows, error = compressed(values)
    found = expanded(rows)
    assert rows.numel() == pytest.approx(values.numel() * ONE_BIT_BYTES)
    assert torch.equal(found >= 0, values >= 0)
    assert found[:BLOCK].abs().unique().item() == pytest.approx(float(values[:BLOCK].abs().mean()))
    assert torch.allclose(found + error, values, atol=1e-6)


@pytest.mark.slow
def test_it_is_adam_first_and_stays_near_it_when_it_compresses(train: Trainer, tmp_path: Path) -> None:
    steps = ("train.steps=12", "checkpoint.every=6", "train.betas=[0.9, 0.95]")
    adam = train(*ADAM, *steps)
    signs = train(*ONE_BIT, *steps, "train.freeze_steps=6", into=tmp_path / "signs")
    assert largest_difference(adam.losses[:6], signs.losses[:6]) < 1e-5
    assert 1e-5 < largest_difference(adam.losses[7:], signs.losses[7:]) < 0.1
    assert signs.losses[-1] < signs.losses[5]
    saved = store.path_of(signs.run.checkpoints, 6)
    rest = train(*ONE_BIT, *steps, "train.freeze_steps=6", f"checkpoint.resume={saved}")
    assert rest.losses == signs.losses[6:]


@pytest.mark.slow
def test_16_bits_compress_too(train: Trainer) -> None:
    found = train(*ONE_BIT, "train.freeze_steps=2", "train.steps=6", "model.precision=bf16")
    assert found.losses[-1] < found.losses[0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("train.grad_clip=1", "train.freeze_steps=2"), "no rank has the full gradient"),
        (("train.grad_clip=0", "train.freeze_steps=2", "strategy.name=zero"), "between full replicas"),
        (("train.grad_clip=0", "train.freeze_steps=2", "strategy.zero_stage=1"), "between full replicas"),
        (("train.grad_clip=0", "train.freeze_steps=2", "model.precision=fp16"), "changing loss scale"),
        (("train.grad_clip=0",), "required with onebit_adam"),
        (("train.grad_clip=0", "train.freeze_steps=2", "metrics.noise_scale=true"), "needs reduced gradients"),
        (("train.grad_clip=0", "train.freeze_steps=2", "train.optimizer=adamw"), "unused with optimizer adamw"),
    ],
)
def test_what_it_cannot_do_is_refused(train: Trainer, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        train("train.optimizer=onebit_adam", *overrides)
