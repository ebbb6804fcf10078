"""A head that computes the loss: the values and gradients of complete logits, in blocks of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, linear
from torch.profiler import ProfilerActivity, profile

from toolkit.recipe.model_section import Model
from toolkit.runtime.metrics.memory import _largest_growth
from toolkit.runtime.models import head_loss
from toolkit.runtime.models.head_loss import HeadLoss, Transform, why_not
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.runtime.models.parameter_shards import shares
from toolkit.runtime.sharding.collectives import TensorGroup, copy_in
from toolkit.runtime.supervision.warm_pool import call_on_ranks

TOKENS, WIDTH, VOCABULARY = (2, 6), 16, 50
TRANSFORMS = [Transform(), Transform(0.3), Transform(cap=5.0), Transform(2.0, 3.0)]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven columns at a time, though everything would fit at once."""
    monkeypatch.setattr(head_loss, "WHOLE_ELEMENTS", 0)
    monkeypatch.setattr(head_loss, "_width", lambda rows: 7)


def case(dtype: torch.dtype, bias: bool) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(*TOKENS, WIDTH), (VOCABULARY, WIDTH), *([(VOCABULARY,)] if bias else [])]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    labels = torch.randint(0, VOCABULARY, TOKENS, generator=generator)
    labels[0, :2] = IGNORE
    return labels, tensors[0], [tensor.requires_grad_() for tensor in tensors]


def by_logits(tensors: list[torch.Tensor], labels: torch.Tensor, transform: Transform) -> tuple[torch.Tensor, int]:
    hidden, weight, *bias = tensors
    logits = transform(linear(hidden.flatten(0, 1), weight, *bias))
    wide = logits if logits.dtype == torch.float64 else logits.float()
    right = (logits.argmax(-1) == labels.flatten()) & (labels.flatten() != IGNORE)
    return cross_entropy(wide, labels.flatten(), ignore_index=IGNORE, reduction="sum"), int(right.sum())


def by_head(tensors: list[torch.Tensor], labels: torch.Tensor, loss: HeadLoss) -> torch.Tensor:
    loss.expect(MicroBatch(None, labels))
    return loss.of_hidden(tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_loss_and_gradients_are_those_of_complete_logits(
    transform: Transform, bias: bool, long: bool, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`long`: sequences whose gradient is summed a few tokens at a time."""
    monkeypatch.setattr(head_loss, "SUM_ELEMENTS", 5 * WIDTH if long else 2**20)
    labels, _, tensors = case(dtype, bias)
    loss = HeadLoss(transform)
    expected, right = by_logits(tensors, labels, transform)
    found = loss(by_head(tensors, labels, loss), labels)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=bound)
    pairs = zip(torch.autograd.grad(1.7 * expected, tensors), torch.autograd.grad(1.7 * found, tensors), strict=True)
    assert all(float((a - b).abs().max()) <= bound * float(a.abs().max()) for a, b in pairs)
    with torch.no_grad():
        assert int(loss.num_correct(by_head(tensors, labels, loss), labels)) == right


@pytest.mark.usefixtures("small_blocks")
def test_a_frozen_head_gets_no_gradient() -> None:
    labels, hidden, (_, weight) = case(torch.float32, bias=False)
    loss = HeadLoss(Transform())
    loss.expect(MicroBatch(None, labels))
    loss(loss.of_hidden(hidden, weight.detach(), None), labels).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None


def test_logits_of_prompts_are_left_out_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, _, tensors = case(torch.float64, bias=True)
    labels[0, : labels.shape[1] // 2] = IGNORE
    made: list[int] = []
    whole = HeadLoss._whole

    def counting(self: HeadLoss, rows: torch.Tensor, *rest: Any) -> Any:
        made.append(len(rows))
        return whole(self, rows, *rest)

    monkeypatch.setattr(HeadLoss, "_whole", counting)
    results = []
    for share in (head_loss.WORTH_SKIPPING, 0.0):
        monkeypatch.setattr(head_loss, "WORTH_SKIPPING", share)
        loss = HeadLoss(Transform(cap=5.0))
        loss.smoothing = 0.1
        total = loss(by_head(tensors, labels, loss), labels)
        results.append([total.detach(), *torch.autograd.grad(total, tensors)])
    assert made == [int((labels != IGNORE).sum()), labels.numel()]
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_no_counted_token_is_a_loss_of_zero() -> None:
    labels, _, tensors = case(torch.float32, bias=False)
    loss = HeadLoss(Transform())
    assert float(loss(by_head(tensors, labels.fill_(IGNORE), loss), labels).detach()) == 0.0


def on_a_slice(dtype: torch.dtype) -> tuple[float, list[torch.Tensor], int]:
    """On each of two ranks: its slice of the vocabulary."""
    head_loss._width = lambda rows: 7
    rank = torch.distributed.get_rank()
    group = TensorGroup(torch.distributed.group.WORLD, rank, 2)
    labels, hidden, (_, weight) = case(dtype, bias=False)
    own = weight.detach().split(shares(VOCABULARY, 2))[rank].clone().requires_grad_()
    loss = HeadLoss(Transform(cap=5.0), group, sum(shares(VOCABULARY, 2)[:rank]))
    loss.expect(MicroBatch(None, labels))
    total = loss(loss.of_hidden(copy_in(hidden, group), own, None), labels)
    gradients = list(torch.autograd.grad(total, [hidden, own]))
    with torch.no_grad():
        loss.expect(MicroBatch(None, labels))
        hits = loss.num_correct(loss.of_hidden(hidden, own, None), labels)
    return float(total.detach()), gradients, int(hits)


def test_slices_of_the_vocabulary() -> None:
    labels, _, tensors = case(torch.float64, bias=False)
    expected, right = by_logits(tensors, labels, Transform(cap=5.0))
    of_hidden, of_weight = torch.autograd.grad(expected, tensors)
    answers: list[Any] = call_on_ranks(on_a_slice, torch.float64, nproc=2)
    for total, (hidden, _), hits in answers:
        assert total == pytest.approx(float(expected.detach()), rel=1e-12)
        assert torch.allclose(hidden, of_hidden, rtol=1e-12, atol=1e-12)
        assert hits == right
    assert torch.allclose(torch.cat([weight for _, (_, weight), _ in answers]), of_weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite", "cohere", "gpt2", "qwen2", "mixtral"])
def test_heads_of_these_models_compute_the_loss(kind: str) -> None:
    """Gemma caps its logits, Granite and Cohere scale them, GPT-2's head is tied."""
    assert why_not(Model(config={"model_type": kind}, precision="fp32")) == ""


def test_a_trial_leaves_the_random_generators_alone() -> None:
    """Dropout would draw the same numbers whatever the seed of the run."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    why_not(Model(config={"model_type": "llama"}, precision="fp32"))
    assert torch.equal(torch.rand(3), expected)


def test_a_model_with_another_loss_keeps_its_logits() -> None:
    assert "another loss" in why_not(
        Model(config={"model_type": "llama"}, precision="fp32", task="sequence-classification")
    )


@pytest.mark.slow
def test_bytes_do_not_grow_with_the_vocabulary() -> None:
    """A quarter of the tokens of a real micro-batch, all ids of a real vocabulary, a narrow model."""
    tokens, width, vocabulary = 2048, 32, 128_256
    hidden = torch.randn(1, tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    loss, labels = HeadLoss(Transform()), torch.randint(0, vocabulary, (1, tokens))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        loss.expect(MicroBatch(None, labels))
        loss(loss.of_hidden(hidden, weight, None), labels).backward()  # type: ignore[no-untyped-call]
    logits_bytes = 4 * tokens * vocabulary
    assert _largest_growth(watch) - weight.nbytes < 0.35 * logits_bytes
