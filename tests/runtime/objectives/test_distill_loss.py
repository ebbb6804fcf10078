"""Distillation: the divergence of complete distributions if all tokens are kept, and a bound of it otherwise."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import kl_div

from toolkit.recipe.objective_sections import Distill
from toolkit.runtime.models.loss import summed_loss
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.runtime.objectives.distill_loss import DistillLoss, outcomes

VOCABULARY = 11


def logits(seed: int) -> torch.Tensor:
    return 2 * torch.randn(2, 5, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(student: torch.Tensor, teacher: torch.Tensor, settings: Distill) -> torch.Tensor:
    labels = torch.arange(10).view(2, 5)
    labels[1, 3:] = IGNORE
    scaled = teacher / settings.temperature
    ids = scaled.topk(min(settings.top_k, VOCABULARY), -1).indices
    loss = DistillLoss(summed_loss, settings)
    loss.expect(MicroBatch(labels.clamp_min(0), labels, teacher_ids=ids, teacher_logps=outcomes(scaled, ids)))
    return loss(student, labels)


@pytest.mark.parametrize("kind", ["forward", "reverse"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_with_all_tokens_it_is_the_divergence_of_the_distributions(kind: str, temperature: float) -> None:
    student, other = logits(0).requires_grad_(), logits(0).requires_grad_()
    teacher = logits(1)
    settings = Distill(teacher="x", kl=kind, temperature=temperature, top_k=VOCABULARY)  # type: ignore[arg-type]
    found = loss_of(student, teacher, settings)
    ours, theirs = ((each / temperature).log_softmax(-1) for each in (other, teacher))
    pair = (ours, theirs) if kind == "forward" else (theirs, ours)
    each = kl_div(*pair, reduction="none", log_target=True).sum(-1)
    expected = temperature**2 * (each[0].sum() + each[1, :3].sum())
    torch.autograd.backward([found, expected])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(student.grad, other.grad)


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_fewer_tokens_give_a_lower_bound_that_is_zero_for_equals(kind: str) -> None:
    teacher = logits(1)
    few, all_of_them = (
        float(loss_of(logits(0), teacher, Distill(teacher="x", kl=kind, top_k=k)))  # type: ignore[arg-type]
        for k in (3, VOCABULARY)
    )
    assert 0 < few < all_of_them
    assert float(loss_of(teacher, teacher, Distill(teacher="x", kl=kind, top_k=3))) == pytest.approx(0, abs=1e-12)  # type: ignore[arg-type]


def test_a_share_of_the_cross_entropy_is_mixed_in() -> None:
    settings = Distill(teacher="x", top_k=3, ce_weight=1.0)
    labels = torch.arange(10).view(2, 5)
    labels[1, 3:] = IGNORE
    expected = summed_loss(logits(0), labels)
    assert float(loss_of(logits(0), logits(1), settings)) == pytest.approx(float(expected), rel=1e-6)
