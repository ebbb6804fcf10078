"""Cached verdicts: kept by type, switches and axes, and heeded by planning."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.plans.plan import Plan, Refusal
from toolkit.plans.split_verdicts import Axes, Proofs, judged
from toolkit.recipe.model_section import Model
from toolkit.verdicts import Verdict

AUTO = Model()
LLAMA = {"model_type": "llama", "hidden_size": 64, "attention_bias": False}


def test_a_verdict_is_found_again_and_does_not_depend_on_sizes(tmp_path: Path) -> None:
    proofs, axes = Proofs(tmp_path / "deep" / "proofs.json"), Axes(2, 1, 1)
    assert proofs.get(LLAMA, AUTO, axes) is None
    proofs.put(LLAMA, AUTO, axes, Verdict(False, "because"))
    again = Proofs(tmp_path / "deep" / "proofs.json")
    assert again.get({**LLAMA, "hidden_size": 4096}, AUTO, axes) == Verdict(False, "because")
    assert again.get({**LLAMA, "attention_bias": True}, AUTO, axes) is None
    assert again.get(LLAMA, Model(attention="eager"), axes) is None
    assert again.get(LLAMA, Model(task="classification"), axes) is None
    assert again.get(LLAMA, AUTO, Axes(4, 1, 1)) is None


def test_a_broken_cache_is_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "proofs.json"
    path.write_text("{no json")
    assert Proofs(path).get(LLAMA, AUTO, Axes(2, 1, 1)) is None


def test_planning_refuses_what_has_failed_and_nothing_else() -> None:
    plans = [Plan(strategy="zero", dp=2), Plan(strategy="pipeline", pp=2), Plan(strategy="tensor_parallel", tp=2)]
    found = list(judged(plans, lambda axes: Verdict(axes.pp == 1, "layers run twice")))
    assert found[0] == plans[0]
    assert found[1] == Refusal("pipeline", "layers run twice", plans[1])
    assert found[2] == plans[2]


def test_more_than_three_stages_are_proven_as_three() -> None:
    assert Axes.of(Plan(strategy="pipeline", pp=16)) == Axes(1, 3, 1)


@pytest.mark.parametrize(
    "data", [b"\xff\xfe", b"[" * 100_000, b'{"a": 3}', b'{"a": {"ok": "yes"}}', b"[]", b"{", bytes(9)]
)
def test_a_damaged_cache_is_ignored_with_a_line_and_made_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes
) -> None:
    path = tmp_path / "proofs.json"
    path.write_bytes(data)
    config, section, axes = {"model_type": "llama"}, Model(path="x"), Axes(2, 1, 1)
    assert Proofs(path).get(config, section, axes) is None
    assert f"{path} is damaged and ignored" in capsys.readouterr().err
    Proofs(path).put(config, section, axes, Verdict(True))
    capsys.readouterr()
    assert Proofs(path).get(config, section, axes) == Verdict(True)
    assert capsys.readouterr().err == ""


def test_where_shares_of_tokens_are_wrong_the_plan_follows_with_complete_residuals() -> None:
    shared = Plan(strategy="tensor_parallel", tp=2, sequence_sharded=True)
    whole = Plan(strategy="tensor_parallel", tp=2)
    refused = Refusal("tensor_parallel", "mixes tokens", shared)

    def verdict(axes: Axes) -> Verdict:
        return Verdict(not axes.sequence_sharded, "mixes tokens")

    assert list(judged([shared], verdict)) == [refused, whole]
    assert list(judged([shared], verdict, fixed=("sequence_sharded",))) == [refused]
    assert list(judged([shared], lambda axes: Verdict(False, "no"))) == [
        Refusal("tensor_parallel", "no", shared),
        Refusal("tensor_parallel", "no", whole),
    ]
