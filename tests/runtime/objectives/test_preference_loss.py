"""Losses of pairs: TRL's results on the same batches, and every pair counted once."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.pairs import pairs
from tests.helpers.parallel import model
from toolkit.recipe.objective_sections import Objective, Preference
from toolkit.runtime.models.attention import forward
from toolkit.runtime.models.build import build_model
from toolkit.runtime.models.loss import summed_loss
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.runtime.objectives.preference_loss import FIGURES, PreferenceLoss, UnpairedLoss

CPU = SimpleNamespace(device="cpu")
STEPS, PAIRS = 20, 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of small operators would wait for each other while other tests run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logps_of(net: Any, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities of the answers, their tokens), chosen and rejected in columns; in plain torch, row by row."""
    logps = forward(net, micro).logits.float().log_softmax(-1)
    own = torch.where(
        micro.labels == IGNORE, 0.0, logps.gather(-1, micro.labels.clamp_min(0)[..., None])[..., 0]
    ).flatten()
    assert micro.documents is not None
    bounds = micro.documents.bounds.tolist()
    counted = (micro.labels != IGNORE).flatten()
    found = [(own[a:b].sum(), counted[a:b].sum()) for a, b in itertools.pairwise(bounds)]
    return torch.stack([value for value, _ in found]).view(-1, 2), torch.stack([n for _, n in found]).view(-1, 2)


def trl_loss(objective: Objective, given: Preference, logps: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """TRL's loss of each pair; the chosen answer's cross-entropy is added as its trainers do."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    settings = given.of(objective)
    mean = logps / counts
    assert settings.sft_weight is not None
    sft = -settings.sft_weight * mean[:, 0]
    if objective == "orpo":
        return sft - ORPOTrainer.odds_ratio_loss(SimpleNamespace(beta=settings.beta, accelerator=CPU), *mean.T)[0]
    trainer = SimpleNamespace(
        alpha=0.0, beta=settings.beta, simpo_gamma=settings.gamma, label_smoothing=settings.label_smoothing,
        loss_type="simpo" if objective == "simpo" else "sigmoid", accelerator=CPU,
    )  # fmt: skip
    return sft + CPOTrainer.cpo_loss(trainer, *(mean if objective == "simpo" else logps).T)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "settings"),
    [
        ("cpo", Preference()),
        ("cpo", Preference(beta=0.3, label_smoothing=0.2, sft_weight=0.5)),
        ("simpo", Preference()),
        ("simpo", Preference(beta=1.5, gamma=0.3, sft_weight=0.1)),
        ("orpo", Preference()),
        ("orpo", Preference(beta=0.5)),
    ],
)
def test_losses_are_those_of_trl_over_twenty_steps(objective: Objective, settings: Preference) -> None:
    net: Any = build_model(model("llama"), seed=0)
    loss, optimizer = PreferenceLoss(summed_loss, objective, settings), torch.optim.SGD(net.parameters(), 0.05)
    for step in range(STEPS):
        micro = pairs([(4, 5 + step % 3, 3), (2, 1, 6), (3, 4, 4)], seed=step)
        loss.expect(micro)
        found = loss(forward(net, micro).logits, micro.labels) / PAIRS
        with torch.no_grad():
            expected = trl_loss(objective, settings, *logps_of(net, micro)).mean()
        assert float(found.detach()) == pytest.approx(float(expected), rel=1e-5)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()


def dpo_trainer(net: Any, loss_type: str, beta: float, output: str) -> Any:
    """TRL's trainer with a live reference, as a user would make it."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    backend = Tokenizer(WordLevel({f"w{number}": number for number in range(120)}, unk_token="w0"))  # noqa: S106
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{"eos_token": "w1", "pad_token": "w2"})
    rows = [
        {"prompt": f"w{n + 3} w5 w6", "chosen": f" w7 w{n + 9}", "rejected": " w8" * (1 + n % 4)}
        for n in range(PAIRS * STEPS)
    ]
    arguments = DPOConfig(
        output_dir=output, loss_type=loss_type, beta=beta, per_device_train_batch_size=PAIRS, report_to="none",
        use_cpu=True, bf16=False, gradient_checkpointing=False, train_sampling_strategy="sequential",
    )  # fmt: skip
    return DPOTrainer(
        net, copy.deepcopy(net), arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )


def from_trl(inputs: dict[str, torch.Tensor], reference: torch.Tensor | None = None) -> MicroBatch:
    """TRL's batch, all chosen rows first, as rows of pairs."""
    count = len(inputs["input_ids"]) // 2
    width = 2 * inputs["input_ids"].shape[1]
    ids, labels = torch.zeros(count, width, dtype=torch.long), torch.full((count, width), IGNORE)
    positions = torch.zeros(count, width, dtype=torch.long)
    for row in range(count):
        start = 0
        for document in (row, row + count):
            kept = inputs["attention_mask"][document].bool()
            own, counts = inputs["input_ids"][document][kept], inputs["completion_mask"][document][kept].bool()
            end = start + len(own)
            ids[row, start:end] = own
            labels[row, start : end - 1] = own[1:].masked_fill(~counts[1:], IGNORE)
            positions[row, start:] = torch.arange(width - start)
            start = end
    ones = torch.ones(count, dtype=torch.long)
    return MicroBatch(ids, labels, position_ids=positions, pairs=ones, reference=reference).located()


def kto_trainer(net: Any, output: str) -> Any:
    """TRL's trainer with a live reference, as a user would make it."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast
    from trl import KTOConfig, KTOTrainer

    backend = Tokenizer(WordLevel({f"w{number}": number for number in range(120)}, unk_token="w0"))  # noqa: S106
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{"eos_token": "w1", "pad_token": "w2"})
    rows = [
        {"prompt": f"w{n + 3} w5 w6", "completion": f" w7 w{n + 9}" + " w8" * (n % 4), "label": n % 3 > 0}
        for n in range(PAIRS * STEPS)
    ]
    arguments = KTOConfig(
        output_dir=output, beta=0.2, per_device_train_batch_size=PAIRS, report_to="none", use_cpu=True, bf16=False,
        gradient_checkpointing=False, train_sampling_strategy="sequential", desirable_weight=1.5,
    )  # fmt: skip
    return KTOTrainer(
        net, copy.deepcopy(net), arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )


def as_pairs(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """TRL's answers and mismatched answers as its batches of pairs are: all answers first."""
    width = max(inputs["input_ids"].shape[1], inputs["KL_input_ids"].shape[1])

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))

    names = ("input_ids", "attention_mask", "completion_mask")
    return {name: torch.cat([padded(inputs[name]), padded(inputs[f"KL_{name}"])]) for name in names}


@pytest.mark.slow
def test_losses_without_pairs_are_those_of_trl(tmp_path: Any) -> None:
    net: Any = build_model(model("llama"), seed=0)
    first = copy.deepcopy(net)
    trainer = kto_trainer(net, str(tmp_path))
    loss = UnpairedLoss(summed_loss, Preference(beta=0.2, desirable_weight=1.5))
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    steps = 0
    for inputs in itertools.islice(trainer.get_train_dataloader(), STEPS):
        expected = trainer.compute_loss(net, inputs)
        with torch.no_grad():
            reference = logps_of(first, from_trl(as_pairs(inputs)))[0].flatten()
            labels = torch.as_tensor(inputs["label"]).double()
            micro = replace(from_trl(as_pairs(inputs), reference), scores=labels)
            loss.recorded = []
            loss.expect(micro)
            loss(forward(net, micro).logits, micro.labels)
            settled = loss.settle([micro], lambda values: values)
            loss.recorded = None
            found = loss(forward(net, micro).logits, micro.labels) / PAIRS
        assert float(found) == pytest.approx(float(expected.detach()), rel=1e-5)
        assert settled is not None
        assert float(settled[0]) / PAIRS == pytest.approx(float(found), rel=1e-5)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        steps += 1
    assert steps == STEPS
    assert float(loss._divergence or 0) > 0, "the model has moved away from its reference"


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "loss_type"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_losses_with_a_reference_are_those_of_trl(objective: Objective, loss_type: str, tmp_path: Any) -> None:
    net: Any = build_model(model("llama"), seed=0)
    first = copy.deepcopy(net)
    trainer = dpo_trainer(net, loss_type, 0.2, str(tmp_path))
    loss, optimizer = (
        PreferenceLoss(summed_loss, objective, Preference(beta=0.2)),
        torch.optim.SGD(net.parameters(), 0.01),
    )
    for inputs in itertools.islice(trainer.get_train_dataloader(), STEPS):
        expected = trainer.compute_loss(net, inputs)
        with torch.no_grad():
            reference = logps_of(first, from_trl(inputs))[0].flatten()
            micro = from_trl(inputs, reference)
            loss.expect(micro)
            found = loss(forward(net, micro).logits, micro.labels) / PAIRS
        assert float(found) == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-6)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    assert loss.figures.take() is None, "figures are those of training steps"


def test_rows_without_labels_are_no_pairs() -> None:
    """Rows past the end of the data are copies of others with every label ignored."""
    net: Any = build_model(model("llama"), seed=0)
    micro = pairs([(4, 5, 3), (2, 1, 6)])
    micro.labels[1] = IGNORE
    assert (micro.weighed, micro.counted) == (1, 8)
    loss = PreferenceLoss(summed_loss, "cpo", Preference())
    loss.expect(micro)
    found = loss(forward(net, micro).logits, micro.labels)
    alone = pairs([(4, 5, 3), (2, 1, 6)]).map(lambda tensor: tensor[:1] if tensor.dim() else tensor)
    loss.expect(first := MicroBatch(alone.input_ids, alone.labels, position_ids=alone.position_ids).located())
    assert float(found) == pytest.approx(float(loss(forward(net, first).logits, first.labels)), rel=1e-5)
    figures = loss.figures.take()
    assert figures is not None
    assert len(figures) == len(FIGURES)
