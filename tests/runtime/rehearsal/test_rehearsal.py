"""Rehearsed ranks against real ones: live bytes, collectives that match, and planted defects that are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Trainer
from toolkit.errors import BadInput, NotRehearsable
from toolkit.recipe.file import make_recipe
from toolkit.sessions.rehearse import Rehearsal, choose_ranks, refuse_unfakeable, rehearse
from toolkit.sessions.resolve import resolve
from toolkit.units import GIB

pytestmark = pytest.mark.slow

PLANS = {"zero 2": ("strategy.name=zero", "strategy.zero_stage=2")}
"""Plans whose rehearsal is held to the measured bytes; docs/rehearsal.md says which are not yet."""
BOUND = 0.01
"""Largest relative difference between rehearsed and measured live bytes."""
PLACE = "tests.runtime.rehearsal.planted_defects"


@pytest.fixture(autouse=True)
def planted_defects_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearsing processes do not look for modules in the current directory."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


@pytest.fixture
def larger(recipe_mapping: dict[str, Any]) -> dict[str, Any]:
    """A tiny model that is large enough for its tensors to outweigh the rest of the process."""
    recipe_mapping["model"]["config"] |= {"hidden_size": 128, "intermediate_size": 256}
    return recipe_mapping


def rehearsed(mapping: dict[str, Any], *overrides: str, ranks: str = "roles", defect: str = "") -> Rehearsal:
    return rehearse(resolve(make_recipe(mapping, overrides), 2), ranks, defect=defect)


@pytest.mark.parametrize("name", PLANS)
def test_rehearsed_bytes_are_the_measured_ones(name: str, larger: dict[str, Any], train: Trainer) -> None:
    measured = train(*PLANS[name], "train.steps=2").summary["measured"]["memory_bytes"]
    result = rehearsed(larger, *PLANS[name])
    peak = max(role.step.device_peak_bytes for role in result.roles)
    assert peak == pytest.approx(measured, rel=BOUND)
    assert result.mismatches == ()


@pytest.mark.parametrize(
    ("plan", "defect", "what"),
    [
        ("zero 2", "0:extra_collective", "all_reduce|allreduce"),
        ("zero 2", "1:smaller_buckets", "call"),
        ("zero 2", "1:swapped_order", "call"),
    ],
)
def test_planted_defects_are_found(plan: str, defect: str, what: str, larger: dict[str, Any]) -> None:
    rank, _, function = defect.partition(":")
    result = rehearsed(larger, *PLANS[plan], defect=f"{rank}:{PLACE}:{function}")
    assert result.mismatches
    first = result.mismatches[0]
    assert first.ranks == (0, 1)
    assert "rank 0: " in first.what
    assert "rank 1: " in first.what
    assert any(word in first.what for word in what.split("|"))


@pytest.mark.slow
def test_llama_8b_takes_the_bytes_of_a_gpu_run() -> None:
    """bf16, ZeRO 2 on 8 devices, 4,096 tokens: 56.7 GiB of live tensors per device."""
    mapping = {
        "name": "full-size",
        "model": {"path": "meta-llama/Llama-3.1-8B", "init": "scratch", "precision": "bf16"},
        "data": {"path": "synthetic", "tokenizer": "bytes", "seq_len": 4096, "packing": False},
        "train": {"global_batch": 8, "steps": 2},
        "strategy": {"name": "zero", "zero_stage": 2, "micro_batch": 1, "recompute": "none"},
        "cluster": "dgx-h100",
    }
    (role,) = rehearse(resolve(make_recipe(mapping)), "0").roles
    assert role.step.device_peak_bytes / GIB == pytest.approx(56.69, rel=BOUND)
    assert sum(role.step.parts.values()) == role.step.device_peak_bytes
    assert role.resident_bytes < 2 * GIB


def test_ranks_that_do_not_exist_are_refused(recipe_mapping: dict[str, Any]) -> None:
    plan = resolve(make_recipe(recipe_mapping), 2).chosen.plan
    with pytest.raises(BadInput, match="rank 7 given; the plan has ranks 0 to 1"):
        choose_ranks(plan, "0,7")
    with pytest.raises(BadInput, match="roles, all or ranks"):
        choose_ranks(plan, "first")


def test_what_has_no_fake_is_refused_by_name(recipe_mapping: dict[str, Any]) -> None:
    resolved = resolve(make_recipe(recipe_mapping, ["model.attention=flash_attention_2"]), 2)
    with pytest.raises(NotRehearsable, match="flash_attention_2"):
        refuse_unfakeable(resolved.recipe, resolved.chosen.plan)
