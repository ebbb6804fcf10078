"""A plan is rehearsed before a launch: its verdict is kept, and a plan that does not fit makes room for the next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli import main
from toolkit.recipe.file import make_recipe
from toolkit.sessions import rehearsal_verdict
from toolkit.sessions.rehearsal_verdict import known_verdict, rehearsed
from toolkit.sessions.resolve import Resolved, resolve
from toolkit.verdicts import Verdict, VerdictFile

H100 = ("cluster=dgx-h100", "model.precision=bf16", "strategy.name=zero")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(rehearsal_verdict, "user_cache", lambda: tmp_path)
    return tmp_path / rehearsal_verdict.CACHE_NAME


def planned(mapping: dict[str, Any], *overrides: str) -> Resolved:
    return resolve(make_recipe(mapping, (*H100, *overrides)))


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_refused_and_the_next_one_rehearsed(
    recipe_mapping: dict[str, Any], cache: Path
) -> None:
    first = planned(recipe_mapping)
    too_large = Verdict(False, "does not fit: rank 0 needs 90.0 of 79.2 GiB")
    VerdictFile(cache, "").put(rehearsal_verdict._key(first), too_large)
    said: list[str] = []
    second = rehearsed(first, said.append)
    assert second.chosen.plan != first.chosen.plan
    refusal = second.decision.refused[0]
    assert refusal.plan == first.chosen.plan
    assert "needs 90.0 of 79.2 GiB" in refusal.reason
    assert said[0] == f"rehearsal: {too_large.reason}"
    assert said[-1].startswith("rehearsal: fits: rank 0 needs ")
    assert second.recipe.strategy.zero_stage == second.chosen.plan.zero_stage, "a resume keeps the plan"
    known = known_verdict(second)
    assert known is not None
    assert known.ok


def test_verdicts_are_those_of_the_same_model_batch_and_device(recipe_mapping: dict[str, Any], cache: Path) -> None:
    keys = {
        rehearsal_verdict._key(planned(recipe_mapping, *changed))
        for changed in ((), ("model.config.hidden_size=64",), ("data.seq_len=64",), ("strategy.recompute=full",))
    }
    assert len(keys) == 4
    same = planned(recipe_mapping, "name=other", "train.steps=7", "train.lr=0.5")
    assert rehearsal_verdict._key(same) == rehearsal_verdict._key(planned(recipe_mapping))


def test_plans_for_cpus_are_not_rehearsed(recipe_mapping: dict[str, Any], cache: Path) -> None:
    resolved, said = resolve(make_recipe(recipe_mapping), 2), list[str]()
    assert rehearsed(resolved, said.append) is resolved
    assert said == []
    assert not cache.exists()


def test_emitted_plans_note_the_verdict(
    recipe_mapping: dict[str, Any], cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(recipe_mapping))
    resolved = planned(recipe_mapping)
    VerdictFile(cache, "").put(rehearsal_verdict._key(resolved), Verdict(True, "fits: rank 0 needs 2.0 of 79.2 GiB"))
    for options, noted in (((), "fits: rank 0 needs 2.0 of 79.2 GiB"), (("--no-rehearse",), None)):
        out = tmp_path / f"out-{noted is None}"
        assert main(["emit", str(recipe), *H100, "--for", "deepspeed", "--out", str(out), *options]) == 0
        assert json.loads((out / "plan.json").read_text())["rehearsal"] == noted
        assert ("rehearsal: fits" if noted else "not rehearsed") in capsys.readouterr().out


def test_a_damaged_cache_is_ignored_with_a_line(
    recipe_mapping: dict[str, Any], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.write_text('{"zero": {"ok": "yes"}}')
    assert known_verdict(planned(recipe_mapping)) is None
    assert "is damaged and ignored; plans are rehearsed again" in capsys.readouterr().err
