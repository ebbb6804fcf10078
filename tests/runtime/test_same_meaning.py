"""Every synchronous strategy of the registry records the same loss, gradient norm, learning rate and token counts."""

from __future__ import annotations

import pytest

import strategies
from tests.conftest import Finished, Trainer
from toolkit.run_dir.trajectory import largest_difference
from toolkit.runtime.models.tiny_models import tiny_of_type

UNEVEN = ("data.packing=false", "data.seq_len=64")
"""Replicas count different numbers of tokens: a mean of means would be off by percents."""
MIXTRAL = f"model.config={ {**tiny_of_type('mixtral'), 'vocab_size': 264} }"
OTHERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "hybrid": (4, UNEVEN),
    "expert_parallel": (2, (*UNEVEN, MIXTRAL)),
}
"""Strategies that need more processes than two, or a model with experts."""


SYNCHRONOUS = [name for name in strategies.registry() if name != "local_sgd"]
"""Islands of local_sgd take other updates between two exchanges, by design: tests/runtime/test_local_sgd.py."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_metrics_mean_the_same(train: Trainer, references: dict[tuple[str, ...], Finished], name: str) -> None:
    nproc, base = OTHERS.get(name, (2, UNEVEN))
    if base not in references:
        references[base] = train(*base, "strategy.name=data_parallel", nproc=1)
    one, other = references[base], train(*base, f"strategy.name={name}", nproc=nproc)
    for key in ("step", "tokens", "lr"):
        assert [record[key] for record in one.records] == [record[key] for record in other.records], key
    assert largest_difference(one.losses, other.losses) <= 1e-5
    assert largest_difference(one.norms, other.norms) <= 1e-4
    assert one.summary["tokens"] == other.summary["tokens"]
