"""The functions of `toolkit` for notebooks: the same planning, workers and files as on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit
from toolkit import api
from toolkit.errors import BadInput, LossNotFinite
from toolkit.plans.plan import Plan
from toolkit.reports.curves import curve, page, read_records
from toolkit.runtime.checkpoint.reader import Reader


def test_plan_is_a_function(recipe_mapping: dict[str, Any]) -> None:
    planned = toolkit.plan(recipe_mapping, "strategy.name=zero", nproc=2)
    assert isinstance(planned.plan, Plan)
    assert "zero 1" in repr(planned)
    assert planned.to_json()["chosen"]["dp"] == 2


def test_a_shipped_recipe_as_a_tiny_model_and_its_page(tmp_path: Path) -> None:
    planned = toolkit.plan("sft_llama-3-70b_zero", nproc=2, tiny=True)
    assert planned.resolved.job.model.params < 1e6
    assert planned.resolved.job.cluster.device.backend == "cpu"
    planned.write_html(tmp_path / "plan.html")
    assert json.dumps(planned.plan.describe()) in (tmp_path / "plan.html").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_train_resume_and_the_trained_model(
    recipe_mapping: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ("checkpoint.every=2", "train.schedule=constant")
    run = toolkit.train(recipe_mapping, *overrides, "train.steps=2", nproc=2, run_dir=tmp_path / "run")
    assert run.summary["status"] == "done"
    run = toolkit.resume(run.path, "train.steps=4", "strategy.name=zero", "strategy.zero_stage=3", nproc=1)
    assert [row["step"] for row in map(dict, run.metrics.to_dict("records"))] == [1, 2, 3, 4]
    model = run.model()
    assert sum(p.numel() for p in model.parameters()) == 35_488
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
    text = run.sample("the quick", tokens=4, temperature=0)
    assert text.startswith("the quick")
    assert text == run.sample("the quick", tokens=4, temperature=0)
    run.report()
    assert "predicted" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_the_model_of_a_classification_run_has_its_head(recipe_mapping: dict[str, Any], tmp_path: Path) -> None:
    config = {
        "model_type": "bert", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 264, "max_position_embeddings": 64,
    }  # fmt: skip
    recipe = {
        **recipe_mapping,
        "model": {"config": config, "precision": "fp32", "num_labels": 4},
        "data": {"path": "synthetic", "format": "classification", "tokenizer": "bytes", "seq_len": 32},
    }
    run = toolkit.train(recipe, "train.steps=2", "checkpoint.every=2", nproc=1, run_dir=tmp_path / "run")
    model = run.model()
    assert type(model).__name__ == "BertForSequenceClassification"
    checkpoint = Reader.open(run.path / "checkpoints" / "step-00000002")
    assert torch.equal(model.classifier.weight, checkpoint.full("classifier.weight", "weight")), "not a fresh head"
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 4)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_errors_are_one_readable_exception(recipe_mapping: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"did you mean train\.steps"):
        toolkit.train(recipe_mapping, "train.sterps=3", nproc=2)
    with pytest.raises(LossNotFinite, match="at step"):
        toolkit.train(recipe_mapping, "train.lr=1e30", "train.optimizer=sgd", nproc=1, run_dir=tmp_path / "bad")
    again = toolkit.train(recipe_mapping, "train.steps=1", nproc=1, run_dir=tmp_path / "good")
    assert again.summary["status"] == "done", "a second run works"


def test_arguments_for_other_trainers(recipe_mapping: dict[str, Any], tmp_path: Path) -> None:
    planned = api.plan(
        recipe_mapping, "strategy={name: zero, zero_stage: 2, micro_batch: 2}", "train.warmup=0", nproc=2
    )
    arguments = toolkit.training_arguments(planned, str(tmp_path))
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * 2 == 8
    assert (arguments.learning_rate, arguments.max_grad_norm) == (0.01, 1.0)
    plugin = toolkit.deepspeed_plugin(planned)
    assert plugin.zero_stage == 2


def test_the_curve_of_a_cell(tmp_path: Path) -> None:
    records = [{"step": i, "loss": 5.0 - i, "tokens_per_second": 1e4, "mfu": 0.5} for i in range(3)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 3, "lo')
    assert read_records(path) == records, "half a line is not read"
    assert "step 2/10 · loss 3.0000 · 10,000 tokens/s · MFU 50.0%" in page(records, 10)
    assert curve([3.0, 2.0, 1.0]).count(",") == 3
    assert len(curve([float(i) for i in range(100_000)])) < 20_000
    assert read_records(tmp_path / "none") == []
