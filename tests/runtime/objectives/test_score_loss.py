"""Scores of texts: TRL's reward loss on the same batches, rankings against numbers worked by hand."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.parallel import model
from toolkit.recipe.objective_sections import Preference, Rank
from toolkit.runtime.models.attention import forward
from toolkit.runtime.models.build import build_model
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.runtime.objectives.score_loss import RankLoss, RewardLoss, ranking_figures

STEPS, PAIRS = 20, 3

pytestmark = pytest.mark.slow


def scored(section: Any) -> Any:
    """A tiny model with a head of one output."""
    from dataclasses import replace

    return replace(section, task="classification", num_labels=1)


def reward_trainer(net: Any, center: float | None, output: Path) -> Any:
    """TRL's trainer, as a user would make it; half of the runs have a margin column."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast
    from trl import RewardConfig, RewardTrainer

    backend = Tokenizer(WordLevel({f"w{number}": number for number in range(120)}, unk_token="w3"))  # noqa: S106
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{"eos_token": "w1", "pad_token": "w0"})
    rows = [
        {"prompt": f"w{n + 4} w5 w6", "chosen": f" w7 w{n + 9}", "rejected": " w8" * (1 + n % 4)}
        | ({} if center is None else {"margin": n % 3 / 2})
        for n in range(PAIRS * STEPS)
    ]
    arguments = RewardConfig(
        output_dir=str(output), per_device_train_batch_size=PAIRS, report_to="none", use_cpu=True, bf16=False,
        gradient_checkpointing=False, train_sampling_strategy="sequential", center_rewards_coefficient=center,
        disable_dropout=True,
    )  # fmt: skip
    return RewardTrainer(net, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def from_trl(inputs: dict[str, torch.Tensor]) -> MicroBatch:
    """TRL's batch, all chosen rows first, as samples of two rows."""
    count = len(inputs["input_ids"]) // 2
    order = torch.arange(2 * count).view(2, count).T.flatten()
    margins = inputs.get("margin")
    scores = None if margins is None else torch.stack([margins, torch.zeros_like(margins)], 1)
    labels = torch.zeros(count, dtype=torch.long)
    return MicroBatch(inputs["input_ids"][order], labels, inputs["attention_mask"][order], scores=scores)


@pytest.mark.parametrize("center", [None, 0.02])
def test_rewards_have_the_losses_of_trl_over_twenty_steps(center: float | None, tmp_path: Path) -> None:
    net: Any = build_model(scored(model("llama", pad_token_id=0)), seed=0)
    trainer = reward_trainer(copy.deepcopy(net), center, tmp_path)
    loss, optimizer = RewardLoss(Preference(center_weight=center)), torch.optim.SGD(net.parameters(), 0.05)
    batches = 0
    for inputs in trainer.get_train_dataloader():
        trainer.model.load_state_dict(net.state_dict())
        expected = float(trainer.compute_loss(trainer.model, dict(inputs)).detach())
        micro = from_trl(inputs)
        loss.expect(micro)
        found = loss(forward(net, micro).logits, micro.labels) / PAIRS
        assert float(found.detach()) == pytest.approx(expected, rel=1e-5)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        batches += 1
    assert batches == STEPS


def test_pairs_that_are_padding_do_not_count() -> None:
    loss = RewardLoss(Preference())
    logits, labels = torch.tensor([[2.0], [1.0], [5.0], [0.0]]), torch.tensor([0, IGNORE])
    loss.expect(MicroBatch(torch.zeros(4, 2, dtype=torch.long), labels))
    assert float(loss(logits, labels)) == pytest.approx(math.log1p(math.exp(-1)))
    assert int(loss.num_correct(logits, labels)) == 1


@pytest.mark.parametrize("kind", ["listwise", "pointwise"])
def test_candidates_are_compared_as_worked_by_hand(kind: str) -> None:
    loss = RankLoss(Rank(loss=kind))  # type: ignore[arg-type]
    scores = torch.tensor([[1.0, 0.0, 9.0]])
    labels = torch.zeros(1, dtype=torch.long)
    loss.expect(MicroBatch(torch.zeros(3, 2, dtype=torch.long), labels, scores=torch.tensor([[1.0, 0.0, -1.0]])))
    found = float(loss(scores.view(-1, 1), labels))
    sigmoid = 1 / (1 + math.exp(-1))
    by_hand = {"listwise": -math.log(sigmoid), "pointwise": (-math.log(sigmoid) - math.log(0.5)) / 2}
    assert found == pytest.approx(by_hand[kind]), "the third candidate is not there"


def test_rankings_are_measured_as_worked_by_hand() -> None:
    relevance = torch.tensor([[0.0, 2.0, 1.0], [1.0, 0.0, -1.0]])
    found = ranking_figures(torch.tensor([[3.0, 2.0, 1.0], [0.0, -1.0, 7.0]]), relevance)
    assert found["accuracy"].tolist() == [0.0, 1.0]
    assert found["mrr"].tolist() == [0.5, 1.0]
    first = (2 / math.log2(3) + 1 / 2) / (2 + 1 / math.log2(3))
    assert found["ndcg"].tolist() == pytest.approx([first, 1.0])
