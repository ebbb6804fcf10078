"""Every format trained for real, with one process's loss; evaluation under every strategy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import Finished, Trainer
from toolkit.checkpoints.store import best, steps
from toolkit.sessions.parity import largest_difference

pytestmark = pytest.mark.slow

BERT = "{model_type: bert, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 64, vocab_size: 264, max_position_embeddings: 128, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}"  # noqa: E501
VIT = "{model_type: vit, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 64, image_size: 16, patch_size: 4}"  # noqa: E501
T5 = "{model_type: t5, vocab_size: 264, d_model: 32, d_kv: 8, d_ff: 64, num_layers: 2, num_heads: 4, decoder_start_token_id: 256, dropout_rate: 0.0}"  # noqa: E501
COMMON = ("data.path=synthetic", "train.steps=6", "train.warmup=0", "data.seq_len=64")
FORMATS = {
    "chat": ("data.format=chat",),
    "instruction": ("data.format=instruction",),
    "classification": ("data.format=classification", f"model.config={BERT}", "model.num_labels=4"),
    "decoder": ("data.format=classification", "model.config.pad_token_id=257", "model.num_labels=4"),
    "image-classification": ("data.format=image-classification", f"model.config={VIT}", "model.num_labels=4"),
    "seq2seq": ("data.format=seq2seq", f"model.config={T5}"),
    "lora": ("data.format=chat", "model.lora={rank: 4}"),
}


def same(one: Finished, other: Finished) -> None:
    assert largest_difference(one.losses, other.losses) <= 1e-5, (one.losses, other.losses)
    assert largest_difference(one.norms, other.norms) <= 1e-4


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("chat", 3),
        ("instruction", 2),
        ("classification", 3),
        ("decoder", 2),
        ("image-classification", 0),
        ("seq2seq", 3),
        ("lora", 2),
    ],
)
def test_formats_learn_alike(name: str, stage: int, train: Trainer) -> None:
    """The number of tokens that count differs from replica to replica; classes are weighted by sample."""
    given = (*COMMON, *FORMATS[name])
    one = train(*given, "strategy.name=data_parallel", nproc=1)
    strategy = "zero" if stage else "data_parallel"
    same(one, train(*given, f"strategy.name={strategy}", f"strategy.zero_stage={stage}", "strategy.micro_batch=2"))
    assert min(one.losses[3:]) < one.losses[0]
    if "classification" in name or name == "decoder":
        assert {record["tokens"] for record in one.records} == {8}


def test_a_classifier_learns_its_classes(train: Trainer) -> None:
    held_out = ("data.eval_fraction=0.2", "train.eval_every=20")
    done = train(*COMMON, *FORMATS["image-classification"], *held_out, "train.steps=40")
    assert done.summary["eval"]["best"]["accuracy"] > 0.6, "chance is a quarter"


EVALUATED = ("data.eval_fraction=0.25", "train.eval_every=2", "checkpoint.every=2", "checkpoint.keep=1")
PACKED: tuple[tuple[str, int], ...] = (
    ("{name: zero, zero_stage: 3, micro_batch: 2}", 2),
    ("{name: tensor_parallel, tp: 2}", 2),
    ("{name: pipeline, pp: 2, micro_batch: 2}", 2),
    ("{name: sequence_parallel, sp: 2}", 2),
    ("{name: hybrid, tp: 2, pp: 2, micro_batch: 2}", 4),
)


@pytest.fixture(scope="module")
def expected() -> dict[str, Finished]:
    """One process's runs, by packing or format."""
    return {}


@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize(
    ("strategy", "nproc"), PACKED, ids=lambda value: str(value).split(",")[0].removeprefix("{name: ")
)
def test_packed_and_padded_data_train_and_evaluate_alike(
    train: Trainer, expected: dict[str, Finished], strategy: str, nproc: int, packing: str
) -> None:
    given = (*EVALUATED, f"data.packing={packing}", "data.seq_len=64")
    if packing not in expected:
        expected[packing] = train(*given, "strategy.name=data_parallel", nproc=1)
    other = train(*given, f"strategy={strategy}", nproc=nproc)
    trained_and_evaluated_alike(expected[packing], other)
    assert all(found["accuracy"] > 0 for found in evaluations(other)), "under tensor parallel no rank has all logits"


@pytest.mark.parametrize(
    ("name", "strategy", "nproc"),
    [
        ("classification", "{name: tensor_parallel, tp: 2}", 2),
        ("classification", "{name: pipeline, pp: 2, micro_batch: 2}", 2),
        ("classification", "{name: hybrid, tp: 2, pp: 2, micro_batch: 2}", 4),
        ("decoder", "{name: pipeline, pp: 2, micro_batch: 2}", 2),
        ("image-classification", "{name: tensor_parallel, tp: 2, zero_stage: 3}", 2),
        ("image-classification", "{name: hybrid, tp: 2, pp: 2, micro_batch: 2}", 4),
        ("seq2seq", "{name: tensor_parallel, tp: 2, zero_stage: 1}", 2),
    ],
)
def test_split_models_of_other_tasks_train_and_evaluate_alike(
    train: Trainer, expected: dict[str, Finished], name: str, strategy: str, nproc: int
) -> None:
    given = (*EVALUATED, *COMMON, *FORMATS[name])
    if name not in expected:
        expected[name] = train(*given, "strategy.name=data_parallel", nproc=1)
    trained_and_evaluated_alike(expected[name], train(*given, f"strategy={strategy}", nproc=nproc))


def trained_and_evaluated_alike(one: Finished, other: Finished) -> None:
    same(one, other)
    for wanted, found in zip(evaluations(one), evaluations(other), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert found.get("perplexity", 0.0) == pytest.approx(wanted.get("perplexity", 0.0), rel=1e-4)
        for exact in ("step", "tokens", "accuracy"):
            assert found[exact] == wanted[exact]


def evaluations(done: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.run.evaluations.read_text().splitlines()]


def test_the_best_checkpoint_is_kept(train: Trainer) -> None:
    """The learning rate ruins the model after some steps: the best is not the newest."""
    rates = ("train.lr=3", "train.warmup=0.9", "train.steps=10", "train.schedule=constant")
    done = train(*EVALUATED, *rates, "strategy.name=zero", "strategy.zero_stage=1", "train.eval_every=2")
    found = evaluations(done)
    lowest = min(found, key=lambda record: float(record["loss"]))
    assert lowest["step"] < 10, "the test needs a run that gets worse"
    assert best(done.run.checkpoints) == lowest["step"]
    assert steps(done.run.checkpoints) == [10, lowest["step"]]
    assert done.summary["eval"] == {"last": found[-1], "best": lowest}


def test_epochs_end_where_the_data_does(train: Trainer) -> None:
    """The last batch is partial, and weighs its tokens only: two replicas agree with one."""
    given = ("train={global_batch: 8, epochs: 1, lr: 0.01}", "data.seq_len=60")
    one = train(*given, "strategy.name=data_parallel", nproc=1)
    other = train(*given, "strategy.name=zero", "strategy.zero_stage=2", "strategy.micro_batch=1")
    same(one, other)
    assert one.records[-1]["tokens"] < 0.9 * one.records[0]["tokens"]
