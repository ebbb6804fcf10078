"""The float64 twin: passes what is right, and finds what fp32 would hide."""

from __future__ import annotations

import pytest

from tests.helpers.parallel import model
from toolkit.plans.split_verdicts import Axes
from toolkit.recipe.model_section import Model, Task
from toolkit.runtime.proofs import split_proof
from toolkit.runtime.proofs.split_proof import prove, prove_all
from toolkit.runtime.sharding import sharding_plan
from toolkit.verdicts import Verdict

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("axes", [Axes(2, 1, 1), Axes(4, 1, 1), Axes(1, 3, 1), Axes(2, 2, 1), Axes(1, 1, 2)], ids=str)
def test_right_splits_pass(axes: Axes) -> None:
    assert prove(model("qwen3"), axes).ok


def test_splits_that_are_proven_together_share_the_unsplit_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tensor ranks need more heads, so a model of their own; a refused split does not spoil the others."""
    made: list[Model] = []
    make = split_proof.unsplit
    monkeypatch.setattr(split_proof, "unsplit", lambda tiny: made.append(tiny) or make(tiny))
    splits = [Axes(2, 1, 1), Axes(1, 2, 1), Axes(1, 1, 3), Axes(4, 1, 1), Axes(2, 2, 1)]
    verdicts = prove_all(model("qwen3"), splits)
    assert [verdict.ok for verdict in verdicts] == [True, True, False, True, True], verdicts
    assert len(made) == 2


@pytest.mark.parametrize(
    ("kind", "task", "axes"),
    [
        ("roberta", "classification", Axes(2, 2, 1)),
        ("qwen3", "classification", Axes(2, 3, 1)),
        ("qwen3", "classification", Axes(1, 1, 2)),
        ("bert", "classification", Axes(1, 1, 2)),
        ("bert", "embedding", Axes(2, 2, 1)),
        ("bert", "embedding", Axes(1, 1, 2)),
        ("vit", "image-classification", Axes(2, 3, 1)),
        ("t5", "seq2seq", Axes(2, 1, 1)),
        ("t5", "seq2seq", Axes(2, 2, 1)),
        ("mbart", "seq2seq", Axes(1, 3, 1, weights_later=True)),
    ],
)
def test_other_tasks_are_proven_with_their_own_heads(kind: str, task: Task, axes: Axes) -> None:
    section = Model(
        config={"model_type": kind}, init="scratch", task=task, num_labels=None if task == "embedding" else 3
    )
    assert prove(section, axes) == Verdict(True)


@pytest.mark.parametrize(("task", "num_labels"), [("classification", 1), ("embedding", None)])
def test_a_wrong_split_of_scores_and_embeddings_is_found(task: Task, num_labels: int | None) -> None:
    """RoBERTa counts positions from the padding id, so a share of the tokens has other positions."""
    section = Model(config={"model_type": "roberta"}, init="scratch", task=task, num_labels=num_labels)
    verdict = prove(section, Axes(1, 1, 2))
    assert not verdict.ok
    assert "the loss of a tiny model is" in verdict.reason


@pytest.mark.parametrize("kind", ["deepseek_v32", "doge"])
def test_attention_that_computes_with_its_mask_is_no_ring(kind: str) -> None:
    """One selects keys by an index over the sequence, the other adds scores of its own."""
    verdict = prove(model(kind), Axes(1, 1, 1, cp=2))
    assert not verdict.ok
    assert verdict.reason.startswith("its attention computes with the mask of all pairs of tokens itself")


def test_layers_that_run_twice_are_refused_with_the_reason() -> None:
    verdict = prove(model("hrm_text"), Axes(1, 2, 1))
    assert not verdict.ok
    assert "not called once each in order" in verdict.reason


def test_recurrent_layers_are_no_sequence_shards() -> None:
    verdict = prove(model("qwen3_next"), Axes(1, 1, 2))
    assert not verdict.ok
    assert "the loss" in verdict.reason


@pytest.mark.parametrize(("kind", "name"), [("apertus", "act_fn")])
def test_errors_of_published_plans_are_found(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prove(model(kind), Axes(2, 1, 1)).ok
    monkeypatch.setattr(sharding_plan, "CORRECTIONS", {})
    verdict = prove(model(kind), Axes(2, 1, 1))
    assert not verdict.ok
    assert name in verdict.reason
