"""Distillation: divergence between the next-token distributions of the student and of a teacher.

Kept are the teacher's likeliest tokens; all others are one outcome, so both distributions sum to 1. With as many tokens
as the vocabulary has, it is the divergence of the complete distributions.
"""

from __future__ import annotations

import torch

from toolkit.recipe.objective_sections import Distill
from toolkit.runtime.models.loss import Loss
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.runtime.objectives.objective import Figures

SMALLEST_LOGP = -100.0
"""What log-probabilities are cut at: a student must not be punished without limit for what the teacher excludes."""


class DistillLoss:
    """`Loss` over complete logits, around the cross-entropy of the labels."""

    def __init__(self, inner: Loss, settings: Distill) -> None:
        self._inner = inner
        self._settings = settings
        self._micro: MicroBatch | None = None
        self.figures = Figures(("kl", "cross_entropy", "agreement"))

    def expect(self, micro: MicroBatch) -> None:
        """The micro-batch of the next forward pass."""
        self._inner.expect(micro)
        self._micro = micro

    def per_token(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of every token; 0 where it is not counted."""
        settings, counted = self._settings, labels != IGNORE
        divergence = self._divergence(logits) * counted
        cross_entropy = self._inner.per_token(logits, labels)
        if torch.is_grad_enabled():
            self._note(logits, labels, divergence, cross_entropy)
        return (1 - settings.ce_weight) * settings.temperature**2 * divergence + settings.ce_weight * cross_entropy

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.per_token(logits, labels).sum()

    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self._inner.num_correct(logits, labels)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """The likeliest token after each token."""
        return logits.argmax(-1)

    def _divergence(self, logits: torch.Tensor) -> torch.Tensor:
        assert self._micro is not None
        ids, kept = self._micro.teacher_ids, self._micro.teacher_logps
        assert ids is not None, "distillation needs the teacher's pass"
        assert kept is not None
        wide = (logits if logits.dtype == torch.float64 else logits.float()) / self._settings.temperature
        student, teacher = outcomes(wide, ids.long()), kept.to(wide.dtype).clamp_min(SMALLEST_LOGP)
        if self._settings.kl == "forward":
            return (teacher.exp() * (teacher - student)).sum(-1)
        return (student.exp() * (student - teacher)).sum(-1)

    @torch.no_grad()
    def _note(
        self, logits: torch.Tensor, labels: torch.Tensor, divergence: torch.Tensor, cross_entropy: torch.Tensor
    ) -> None:
        assert self._micro is not None
        assert self._micro.teacher_ids is not None
        same = logits.argmax(-1) == self._micro.teacher_ids[..., 0]
        values = {"kl": divergence, "cross_entropy": cross_entropy, "agreement": same}
        self.figures.add(values, (labels != IGNORE).float())


def outcomes(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of some tokens at each position, and last that of all other tokens, if there are any."""
    whole = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(-1, ids) - whole
    if ids.shape[-1] == logits.shape[-1]:
        return chosen
    others = logits.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True) - whole
    return torch.cat([chosen, others], -1).clamp_min(SMALLEST_LOGP)
