"""Keys that fine-tuning expects: label smoothing, counted turns, fewer samples, patience, warnings, best export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.conftest import Trainer
from tests.helpers.parallel import ADAM, ONE, assert_same, model, run
from toolkit.checkpoints import store
from toolkit.cli import main
from toolkit.errors import BadInput
from toolkit.plans.plan import Plan
from toolkit.recipe.file import make_recipe
from toolkit.recipe.sections import Data
from toolkit.run_dir.layout import newest
from toolkit.runtime.between_steps import FLAT_STEPS, ZERO_STEPS, WarningHook
from toolkit.runtime.checkpoint.export import export
from toolkit.runtime.checkpoint.reader import Reader
from toolkit.runtime.corpus.formats import counted_turns, lacks_prompt
from toolkit.runtime.corpus.tokenizer import Bytes
from toolkit.runtime.generate_text import sample
from toolkit.runtime.models.build import build_model, skeleton
from toolkit.runtime.models.documents import Documents
from toolkit.runtime.models.embedder import noise, row_salts
from toolkit.runtime.models.head_loss import HeadLoss, Transform
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.sessions.resolve import resolve

pytestmark = pytest.mark.slow

SMOOTH = replace(ADAM, label_smoothing=0.2)


class OneRank:
    """All columns on one rank: the loss is computed block by block, as it is in shards."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()


def test_smoothed_loss_in_blocks_is_torch_s() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 5, generator=generator), torch.randn(11, 5, generator=generator)
    labels = torch.tensor([3, 0, IGNORE, 10, 7, 1])
    results = []
    for blocks in (True, False):
        rows, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if blocks:
            loss = HeadLoss(Transform(scale=0.5, cap=3.0), OneRank(), vocabulary=11)
            loss.smoothing = 0.2
            loss.expect(MicroBatch(labels[None], labels[None]))
            total = loss(loss.of_hidden(rows[None], head, None), labels[None])
        else:
            logits = Transform(scale=0.5, cap=3.0)(rows @ head.T)
            total = cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=0.2)
        total.backward()
        results.append((total.detach(), rows.grad, head.grad))
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(strategy="tensor_parallel", tp=2, micro_batch=4, precision="fp32"),
        Plan(strategy="pipeline", pp=2, micro_batch=1, grad_accum=4, precision="fp32"),
    ],
    ids=["tp", "pp"],
)
def test_label_smoothing_is_the_same_in_shards_and_stages(plan: Plan) -> None:
    expected = run(model("llama"), ONE, SMOOTH, "padded")
    assert abs(expected.loss[0] - run(model("llama"), ONE, ADAM, "padded").loss[0]) > 1e-4
    assert_same(expected, run(model("llama"), plan, SMOOTH, "padded"))


def test_turns_by_role_and_the_last_one() -> None:
    messages: Any = [{"role": role} for role in ("system", "user", "assistant", "user", "assistant", "tool")]
    assert counted_turns(messages, Data(format="chat")) == [2, 4]
    assert counted_turns(messages, Data(format="chat", train_on="last_turn")) == [4]
    assert counted_turns(messages, Data(format="chat", roles=("user", "assistant"))) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.train_on=last_turn", "data.train_on"),
        ("data.roles=[user]", "data.roles"),
        ("train.patience=2", "train.patience"),
        ("train.muon.momentum=0.9", "train.muon"),
        ("train.states=8bit", "train.states"),
    ],
)
def test_settings_without_effect_are_refused(override: str, key: str, recipe_mapping: dict[str, Any]) -> None:
    optimizer = ["train.optimizer=sgd"] if key == "train.states" else []
    with pytest.raises(BadInput, match=key):
        make_recipe(recipe_mapping, [override, *optimizer])


def finished_step(number: int, loss: float, norm: float, tokens: int) -> Any:
    return SimpleNamespace(number=number, result=SimpleNamespace(loss=loss, grad_norm=norm, tokens=tokens))


def test_useless_runs_are_reported_once() -> None:
    said: list[str] = []
    hook = WarningHook(said.append)
    for number in range(1, FLAT_STEPS + ZERO_STEPS):
        hook.after(finished_step(number, 2.0, 0.0, 0))
    assert len(said) == 3
    assert "every label is masked" in said[0]
    assert "gradients have been 0" in said[1]
    assert "has not moved" in said[2]
    quiet = WarningHook(said.append)
    for number in range(1, FLAT_STEPS + 2):
        quiet.after(finished_step(number, 2.0 - number / 100, 1.0, 8))
    assert len(said) == 3


def test_a_run_stops_after_evaluations_that_are_not_better(train: Trainer, tmp_path: Path) -> None:
    """A learning rate that ruins the model; the best checkpoint is exported."""
    settings = ("train.steps=40", "train.lr=3.0", "train.warmup=0", "train.patience=2", "train.eval_every=1")
    settings += ("data.eval_fraction=0.2", "checkpoint={every: 100, keep: 1, keep_best: 2}", "train.grad_clip=0")
    run = train(*settings, into=tmp_path / "run")
    assert run.codes == [0, 0]
    steps = [json.loads(line)["step"] for line in run.run.evaluations.read_text().splitlines()]
    best = store.best(run.run.checkpoints)
    assert best is not None
    assert steps[-1] == best + 2 < 40
    assert run.summary["status"] == "done"
    assert store.steps(run.run.checkpoints)[0] == steps[-1]
    losses = {line["step"]: line["loss"] for line in map(json.loads, run.run.evaluations.read_text().splitlines())}
    kept = store.all_best(run.run.checkpoints)
    assert kept == sorted(losses, key=lambda step: losses[step])[:2], "the two best, the best first"
    assert main(["export", str(run.run.path), str(tmp_path / "out"), "--best"]) == 0
    assert main(["export", str(run.run.path), str(tmp_path / "second"), "--best", "2"]) == 0
    assert main(["export", str(run.run.path), str(tmp_path / "third"), "--best", "3"]) == 2


PROMPTS = ("train.sample_prompts=['the quick', 'a']", "train.sample_tokens=6", "train.eval_every=4")


def test_evaluations_show_generated_texts(train: Trainer) -> None:
    """The same under data parallel, ZeRO 3 and tensor shards as from the exported model in one process."""
    given = (*PROMPTS, "data.eval_fraction=0.2", "checkpoint.every=4")
    alone = train(*given, "strategy.name=data_parallel", nproc=1)
    (record,) = map(json.loads, alone.run.evaluations.read_text().splitlines())
    assert [sample["prompt"] for sample in record["samples"]] == ["the quick", "a"]
    assert all(sample["text"] for sample in record["samples"])
    for strategy in ("{name: zero, zero_stage: 3}", "{name: tensor_parallel, tp: 2, sequence_sharded: false}"):
        run = train(*given, f"strategy={strategy}")
        assert json.loads(run.run.evaluations.read_text())["samples"] == record["samples"]
    events = [json.loads(line) for line in alone.run.events.read_text().splitlines()]
    assert [event["text"].split(" → ")[0] for event in events if event["kind"] == "sample"] == ["the quick", "a"]
    whole = sample(newest(alone.run.path), "the quick", tokens=6, temperature=0.0, seed=0)
    assert whole == "the quick" + record["samples"][0]["text"]


@pytest.mark.parametrize(
    "overrides", [("strategy={name: pipeline, pp: 2}",), ("strategy.islands=2", "strategy.name=local_sgd")]
)
def test_prompts_are_refused_where_no_call_runs_the_model(
    recipe_mapping: dict[str, Any], overrides: tuple[str, ...]
) -> None:
    resolved = resolve(make_recipe(recipe_mapping, (*PROMPTS, "data.eval_fraction=0.2", *overrides)), 2)
    assert resolved.decision.chosen is None
    assert any("train.sample_prompts needs a forward pass" in one.reason for one in resolved.decision.refused)


def test_noise_does_not_depend_on_the_split(train: Trainer) -> None:
    given = ("train.neftune_alpha=20", "train.schedule=constant", "train.warmup=0")
    plain = train("train.schedule=constant", "train.warmup=0", "strategy.name=data_parallel", nproc=1)
    alone = train(*given, "strategy.name=data_parallel", nproc=1)
    assert alone.losses[0] != pytest.approx(plain.losses[0], rel=1e-4)
    for strategy in ("{name: zero, zero_stage: 3, micro_batch: 2}", "{name: pipeline, pp: 2, micro_batch: 2}"):
        found = train(*given, f"strategy={strategy}")
        assert found.losses == pytest.approx(alone.losses, rel=2e-5)
        assert found.norms == pytest.approx(alone.norms, rel=1e-4)


def test_noise_has_the_size_of_its_document() -> None:
    documents = Documents.of_lengths([4, 12, 16], rows=2)
    found = noise(row_salts(0, 3, np.array([7, 8])), documents, 64, alpha=5.0)
    for place, length in ((found[0, :4], 4), (found[0, 4:], 12), (found[1], 16)):
        size = 5.0 / (length * 64) ** 0.5
        assert float(place.abs().max()) <= size
        assert float(place.std()) == pytest.approx(size / 3**0.5, rel=0.05), "uniform"
        assert abs(float(place.mean())) < 0.1 * size
    assert not torch.equal(found, noise(row_salts(0, 4, np.array([7, 8])), documents, 64, alpha=5.0)), "of each step"
    alone = noise(row_salts(0, 3, np.array([8])), Documents.of_lengths([16], rows=1), 64, alpha=5.0)
    assert torch.equal(alone[0], found[1])


def test_a_trial_reads_fewer_samples(train: Trainer) -> None:
    few = train("train.epochs=1", "train.steps=null", "data.max_samples=8", "data.packing=false")
    assert len(few.losses) == 1


FROZEN = ("*embed_tokens*", "model.layers.0.*")


@pytest.mark.parametrize(
    "axes",
    [{"dp": 2, "zero_stage": 3, "zero_group": 2}, {"tp": 2, "grad_accum": 2}, {"pp": 2, "grad_accum": 2}],
    ids=["zero 3", "tp", "pp"],
)
def test_frozen_parameters_change_no_result_of_a_strategy(axes: dict[str, int]) -> None:
    section = replace(model("llama"), freeze=FROZEN)
    expected = run(section, ONE)
    assert expected.grad_norm[0] < run(model("llama"), ONE).grad_norm[0]
    plan = Plan(strategy="test", micro_batch=2, precision="fp32", **axes)  # type: ignore[arg-type]
    assert_same(expected, run(section, plan))


def test_frozen_parameters_are_exported_as_they_were(train: Trainer, tmp_path: Path) -> None:
    finished = train("model.freeze=['*embed_tokens*']", "checkpoint.every=4", "strategy.name=zero", into=tmp_path / "r")
    saved = store.path_of(finished.run.checkpoints, 4)
    recipe = export(saved, tmp_path / "out")
    first = dict(build_model(recipe.model, recipe.train.seed).named_parameters())
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    same = {name for name, value in first.items() if torch.equal(value, last[name])}
    assert same == {name for name in first if "embed_tokens" in name}
    assert not any("embed_tokens" in name for name in Reader.open(saved).index)


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match=r"model\.freeze.*matches no parameter"):
        skeleton(replace(model("llama"), freeze=("*.nothing.*",)))


class Promptless(Bytes):
    """A template that adds nothing before an answer."""

    def render(self, messages: Any, tools: Any, *, prompt: bool) -> str:
        return super().render(messages, tools, prompt=False)


def test_a_template_without_a_generation_prompt_is_noticed() -> None:
    assert lacks_prompt(Promptless())
    assert not lacks_prompt(Bytes())
