"""Pipelines of encoder-decoders on real processes, against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conftest import Trainer
from tests.helpers.parallel import ONE, SGD, TOKENS, assert_same, batch, model, run
from toolkit.checkpoints import store
from toolkit.plans.job import task_spec
from toolkit.plans.pipeline_bounds import crossing
from toolkit.plans.plan import Plan
from toolkit.recipe.model_section import Lora, Model
from toolkit.runtime.checkpoint.reader import Reader
from toolkit.runtime.models.build import SplitRefused, fill, open_weights, skeleton
from toolkit.runtime.pipeline.split import analyse
from toolkit.runtime.pipeline.stage import Stage
from toolkit.sessions.parity import largest_difference

BOUNDS = {"in the encoder": (0, 2, 8), "after the encoder": (0, 4, 8), "in the decoder": (0, 6, 8)}
TWO = Plan(strategy="pipeline", pp=2, micro_batch=1, grad_accum=4, precision="fp32", pipeline_bounds=(0, 6, 8))


def pairs(kind: str, **config: Any) -> Model:
    """A tiny model of four encoder and four decoder layers."""
    tiny = model(kind, **config)
    layers = {"encoder_layers": 4} if "encoder_layers" in (tiny.config or {}) else {}
    return replace(tiny, config={**(tiny.config or {}), **layers}, task="seq2seq")


@pytest.mark.parametrize("where", BOUNDS)
def test_boundaries_anywhere_under_sgd_with_a_tight_clip(where: str) -> None:
    """Source, target and head share one table; the encoder's output and T5's bias of positions cross boundaries."""
    section = pairs("t5")
    plan = replace(TWO, pipeline_bounds=BOUNDS[where])
    assert_same(run(section, ONE, SGD, "pairs"), run(section, plan, SGD, "pairs"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("bart", {"pp": 4, "pipeline_bounds": (0, 2, 4, 6, 8), "zero_stage": 1, "zero_group": 1}),
        ("mbart", {"pp": 3, "pipeline_bounds": (0, 3, 5, 8), "recompute": "full"}),
        ("t5", {"pp": 3, "pipeline_bounds": (0, 1, 5, 8), "recompute": "selective"}),
        ("marian", {"schedule": "interleaved", "chunks": 2, "pipeline_bounds": (0, 2, 4, 6, 8)}),
        ("t5", {"schedule": "zero_bubble", "chunks": 2, "pipeline_bounds": (0, 2, 4, 6, 8)}),
        ("pegasus", {"dp": 2, "grad_accum": 2, "zero_stage": 1, "zero_group": 2}),
        ("blenderbot", {"strategy": "hybrid", "tp": 2}),
        ("t5", {"strategy": "hybrid", "tp": 2, "zero_stage": 1, "zero_group": 1}),
        ("t5", {"strategy": "hybrid", "tp": 2, "dp": 2, "grad_accum": 2, "zero_stage": 1, "zero_group": 2}),
    ],
)
def test_schedules_recompute_and_tensor_shards(kind: str, axes: dict[str, Any]) -> None:
    section, plan = pairs(kind), replace(TWO, **axes)
    assert_same(run(section, ONE, SGD, "pairs"), run(section, plan, SGD, "pairs"))


@pytest.mark.slow
def test_adapters_leave_the_bias_of_positions_without_a_gradient() -> None:
    """A stage then sends a value that nothing trains, and still gets a gradient back for it."""
    section = replace(pairs("t5"), lora=Lora(rank=2, alpha=4.0))
    assert_same(run(section, ONE, SGD, "pairs"), run(section, TWO, SGD, "pairs"))


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_each_stage_holds_its_own_layers_and_sends_what_was_predicted(kind: str) -> None:
    section = pairs(kind)
    bounds = (0, 2, 4, 6, 8)
    split = analyse(skeleton(section), bounds)
    assert [stages for _, stages in split.shared] == [(0, 2, 3)]  # source, target and head
    spec = task_spec(section.config or {}, section)
    micro = batch(0, "pairs")
    hidden = micro.labels.numel() * spec.hidden
    value: Any = torch.zeros(1)
    for index in range(split.stages - 1):
        part = skeleton(section)
        stage = Stage(part, split, index, torch.float32)
        stage.parameters_by_name = fill(part, open_weights(section, 0), stage.parameters_by_name)
        layers = [name for name in stage.parameters_by_name if ".layers." in name or ".block." in name]
        half = ".encoder." if index < 2 else ".decoder."
        assert all(half in f".{name}" for name in layers)
        stage.feed([micro], 1.0)
        value = stage(value)
        sent = sum(tensor.numel() for tensor in (value if isinstance(value, tuple) else (value,)))
        assert sent / hidden == crossing(spec, bounds[index + 1], len(micro.labels), TOKENS)


def test_an_encoder_output_that_layers_get_as_a_view_is_refused() -> None:
    """FSMT turns it around for every layer, so a received value could not be put in its place."""
    with pytest.raises(SplitRefused, match="without passing through it"):
        analyse(skeleton(pairs("fsmt")), (0, 6, 8))


T5 = "{model_type: t5, vocab_size: 264, d_model: 32, d_kv: 8, d_ff: 64, num_layers: 2, num_heads: 4, decoder_start_token_id: 256, dropout_rate: 0.0}"  # noqa: E501


@pytest.mark.slow
def test_a_run_is_planned_evaluated_saved_and_resumed_elsewhere(train: Trainer) -> None:
    """Through the planner and the proof; checkpoints have Hugging Face's names, each tied table once."""
    given = ("data.path=synthetic", "data.format=seq2seq", f"model.config={T5}", "data.seq_len=64", "train.steps=6")
    given += ("train.warmup=0", "checkpoint.every=3", "data.eval_fraction=0.25", "train.eval_every=3")
    one = train(*given, "strategy.name=data_parallel", nproc=1)
    two = train(*given, "strategy={name: pipeline, pp: 2, schedule: 1f1b, micro_batch: 2}")
    assert largest_difference(one.losses, two.losses) <= 2e-6, (one.losses, two.losses)
    assert largest_difference(one.norms, two.norms) <= 1e-5, (one.norms, two.norms)
    assert two.summary["eval"]["best"]["loss"] == pytest.approx(one.summary["eval"]["best"]["loss"], rel=2e-6)
    saved = store.path_of(two.run.checkpoints, 3)
    names = set(Reader.open(saved).index)
    assert "shared.weight" in names
    assert "decoder.block.1.layer.1.EncDecAttention.q.weight" in names
    assert names == set(Reader.open(store.path_of(one.run.checkpoints, 3)).index)
    three = train(*given, "strategy={name: zero, zero_stage: 3, micro_batch: 2}", f"checkpoint.resume={saved}")
    assert largest_difference(one.losses[3:], three.losses) <= 1e-5
