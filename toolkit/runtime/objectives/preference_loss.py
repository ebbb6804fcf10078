"""Preference objectives: losses of pairs of documents, from the log-probabilities of their answers.

Each pair counts once, whatever its length, and the global batch is averaged over its pairs. So the loss does not depend
on how pairs are split over ranks and micro-batches. Written by hand: TRL's trainers compute these losses from complete
logits, in one process per replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from toolkit.recipe.objective_sections import Objective, Preference
from toolkit.runtime.distributed.process_group import all_sum
from toolkit.runtime.models.loss import Loss, PredictsTokens
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.runtime.objectives.objective import Figures, Total

FIGURES = ("chosen_reward", "rejected_reward", "margin", "accuracy", "chosen_logp", "rejected_logp")
"""What is reported per step, averaged over pairs."""
UNPAIRED_FIGURES = ("desirable_reward", "undesirable_reward", "desirable", "accuracy", "kl")
"""The same of answers without pairs, averaged over answers."""


@dataclass(frozen=True)
class Pairs:
    """Log-probabilities of the answers of all pairs of a micro-batch; dimension 1 is (chosen, rejected)."""

    logps: torch.Tensor
    counts: torch.Tensor
    """Tokens of each answer, at least 1."""
    reference: torch.Tensor
    present: torch.Tensor
    """1 for a pair, 0 for padding."""
    reported: torch.Tensor
    """As `present`, but 0 on all but one of the ranks that share the tokens of a sequence."""

    @property
    def mean_logps(self) -> torch.Tensor:
        """Per token."""
        return self.logps / self.counts

    def ahead(self, logps: torch.Tensor) -> torch.Tensor:
        """By how much chosen answers are ahead of rejected ones."""
        return logps[:, 0] - logps[:, 1]


Losses = Callable[[Pairs, Preference], torch.Tensor]


def _beta(settings: Preference) -> float:
    assert settings.beta is not None
    return settings.beta


def _smoothed(ahead: torch.Tensor, settings: Preference) -> torch.Tensor:
    wrong = settings.label_smoothing or 0.0
    return -(1 - wrong) * logsigmoid(ahead) - wrong * logsigmoid(-ahead)


def _dpo(pairs: Pairs, settings: Preference) -> torch.Tensor:
    return _smoothed(_beta(settings) * pairs.ahead(pairs.logps - pairs.reference), settings)


def _ipo(pairs: Pairs, settings: Preference) -> torch.Tensor:
    ahead = pairs.ahead((pairs.logps - pairs.reference) / pairs.counts)
    return (ahead - 1 / (2 * _beta(settings))) ** 2


def _cpo(pairs: Pairs, settings: Preference) -> torch.Tensor:
    return _smoothed(_beta(settings) * pairs.ahead(pairs.logps), settings)


def _simpo(pairs: Pairs, settings: Preference) -> torch.Tensor:
    return -logsigmoid(_beta(settings) * pairs.ahead(pairs.mean_logps) - (settings.gamma or 0.0))


def _orpo(pairs: Pairs, settings: Preference) -> torch.Tensor:
    mean = pairs.mean_logps
    log_odds = mean - torch.log1p(-torch.exp(mean.clamp(max=-1e-7)))
    return -_beta(settings) * logsigmoid(pairs.ahead(log_odds))


_LOSSES: dict[str, Losses] = {"dpo": _dpo, "ipo": _ipo, "cpo": _cpo, "simpo": _simpo, "orpo": _orpo}
_PER_TOKEN = ("simpo", "orpo", "ipo")
"""Objectives whose rewards are averages over tokens."""


class _AnswerLoss:
    """What losses of answers have in common, around the loss that gives each token's cross-entropy."""

    def __init__(
        self,
        inner: Loss,
        objective: Objective,
        settings: Preference,
        figures: tuple[str, ...],
        sharing: SequenceRanks | None,
    ) -> None:
        self._inner = inner
        self._settings = settings.of(objective)
        self._micro: MicroBatch | None = None
        self._sharing = sharing
        self.figures = Figures(figures)
        self.recorded: list[torch.Tensor] | None = None
        """If it is a list: log-probabilities of the documents of every micro-batch are appended."""

    def expect(self, micro: MicroBatch) -> None:
        """The micro-batch of the next forward pass."""
        self._inner.expect(micro)
        self._micro = micro

    def per_token(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The cross-entropy of every token."""
        return self._inner.per_token(logits, labels)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """The likeliest token after each token."""
        assert isinstance(self._inner, PredictsTokens)
        return self._inner.likeliest(logits)

    def _pairs(self, logits: torch.Tensor, labels: torch.Tensor) -> Pairs:
        return pairs_of(self._inner, self._micro, logits, labels, self._sharing)

    def _sum(self, losses: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        """The loss of a micro-batch. Ranks that share its tokens all have the gradient of their tokens; one reports."""
        whole = (losses * pairs.present).sum()
        return whole - whole.detach() + (losses.detach() * pairs.reported).sum() if self._sharing else whole


class PreferenceLoss(_AnswerLoss):
    """`Loss` of pairs."""

    def __init__(
        self, inner: Loss, objective: Objective, settings: Preference, sharing: SequenceRanks | None = None
    ) -> None:
        super().__init__(inner, objective, settings, FIGURES, sharing)
        self._objective = objective

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        pairs = self._pairs(logits, labels)
        losses = _LOSSES[self._objective](pairs, self._settings)
        if self._settings.sft_weight:
            losses = losses - self._settings.sft_weight * pairs.mean_logps[:, 0]
        if self.recorded is not None:
            self.recorded.append(pairs.logps.detach().flatten())
        if torch.is_grad_enabled():
            self._note(pairs)
        return self._sum(losses, pairs)

    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Pairs whose chosen answer has the larger reward."""
        pairs = self._pairs(logits, labels)
        return ((pairs.ahead(self._rewards(pairs)) > 0) * pairs.reported).sum().long()

    def _rewards(self, pairs: Pairs) -> torch.Tensor:
        ahead = (pairs.logps - pairs.reference).detach()
        return _beta(self._settings) * (ahead / pairs.counts if self._objective in _PER_TOKEN else ahead)

    @torch.no_grad()
    def _note(self, pairs: Pairs) -> None:
        rewards = self._rewards(pairs)
        ahead = pairs.ahead(rewards)
        rows = (rewards[:, 0], rewards[:, 1], ahead, ahead > 0, pairs.logps[:, 0], pairs.logps[:, 1])
        self.figures.add(dict(zip(FIGURES, rows, strict=True)), pairs.reported)


class UnpairedLoss(_AnswerLoss):
    """KTO: good answers gain and bad ones lose against the reference, beyond what mismatched answers have gained.

    A pair is an answer, and its prompt with the answer of another row. What the latter have gained, on average over
    the global batch, estimates the KL divergence from the reference; it is computed first, without gradients.
    """

    def __init__(self, inner: Loss, settings: Preference, sharing: SequenceRanks | None = None) -> None:
        super().__init__(inner, "kto", settings, UNPAIRED_FIGURES, sharing)
        self._divergence: torch.Tensor | None = None
        self._known: list[Pairs] = []
        """Answers of the micro-batches that were recorded."""

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        pairs = self._pairs(logits, labels)
        if self.recorded is not None:
            self._known = [*(self._known if self.recorded else ()), pairs]
            self.recorded.append(pairs.logps.detach().flatten())
            return pairs.logps.sum() * 0
        losses, rewards, good = self._losses(pairs, self._micro)
        if torch.is_grad_enabled():
            self._note(rewards.detach(), good, pairs.reported)
        return self._sum(losses, pairs)

    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Unused: `settle` counts the answers whose reward has the right sign."""
        return torch.zeros((), dtype=torch.long, device=labels.device)

    def settle(self, batch: Sequence[MicroBatch], total: Total) -> torch.Tensor | None:
        """Estimate the divergence; return loss and correct answers of this rank. See `TwoPass`."""
        if not self.recorded:
            return None
        known, self._known = self._known, []
        gained = [((pairs.logps - pairs.reference)[:, 1] * pairs.present).sum() for pairs in known]
        sums = total(torch.stack([torch.stack(gained).sum(), torch.stack([p.present.sum() for p in known]).sum()]))
        self._divergence = (sums[0] / sums[1].clamp_min(1)).clamp_min(0)
        found = torch.zeros(2, dtype=torch.float64, device=sums.device)
        for micro, pairs in zip(batch, known, strict=True):
            losses, rewards, good = self._losses(pairs, micro)
            right = ((rewards > 0) == good.bool()) * pairs.reported
            found += torch.stack([(losses * pairs.reported).sum().double(), right.sum().double()])
        return found

    def _losses(self, pairs: Pairs, micro: MicroBatch | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(loss, reward, whether it is a good answer) of each answer."""
        assert micro is not None
        assert micro.scores is not None, "KTO needs labels"
        assert self._divergence is not None, "KTO needs the first pass"
        beta, divergence = _beta(self._settings), self._divergence.to(pairs.logps.dtype)
        gained = (pairs.logps - pairs.reference)[:, 0]
        good = micro.scores.to(gained.device, gained.dtype)
        sign = 2 * good - 1
        assert self._settings.desirable_weight is not None
        assert self._settings.undesirable_weight is not None
        weights = good * self._settings.desirable_weight + (1 - good) * self._settings.undesirable_weight
        return weights * (1 - torch.sigmoid(beta * sign * (gained - divergence))), beta * gained, good

    @torch.no_grad()
    def _note(self, rewards: torch.Tensor, good: torch.Tensor, present: torch.Tensor) -> None:
        assert self._divergence is not None
        values = {
            "desirable_reward": rewards * good,
            "undesirable_reward": rewards * (1 - good),
            "desirable": good,
            "accuracy": (rewards > 0) == good.bool(),
            "kl": self._divergence.expand_as(good),
        }
        self.figures.add(values, present)


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that share the tokens of every sequence."""

    group: Any
    first: bool
    """Whether this rank reports what all of them have computed."""


def pairs_of(
    inner: Loss,
    micro: MicroBatch | None,
    logits: torch.Tensor,
    labels: torch.Tensor,
    sharing: SequenceRanks | None = None,
) -> Pairs:
    """Log-probabilities of the answers of a micro-batch, from the loss of each token."""
    assert micro is not None, "the loss of pairs needs the micro-batch before the forward pass"
    assert micro.documents is not None, "the loss of pairs needs the bounds of documents"
    logps = -inner.per_token(logits, labels).flatten()
    counted = (labels != IGNORE).flatten().to(logps.dtype)
    bounds = micro.documents.bounds if micro.own_bounds is None else micro.own_bounds
    # `unsafe`: the bounds are known to be right, and need not be read.
    parts = [torch.segment_reduce(each, "sum", offsets=bounds.long(), unsafe=True) for each in (logps, counted)]
    sums = torch.stack(parts)
    if sharing is not None:
        sums = _OverRanks.apply(sums, sharing.group)  # type: ignore[no-untyped-call]
    # The beginning that two documents share is a prompt, in which nothing counts.
    answers = sums.view(2, -1, 2 if micro.documents.branches is None else 3)[..., -2:]
    known = torch.zeros_like(answers[0]) if micro.reference is None else micro.reference.to(logps.dtype).view(-1, 2)
    present = (answers[1] > 0).all(1).to(logps.dtype)
    reported = present if sharing is None or sharing.first else torch.zeros_like(present)
    return Pairs(answers[0], answers[1].clamp_min(1), known, present, reported)


class _OverRanks(torch.autograd.Function):
    """Sums over the ranks that share sequences. Each rank has the gradient of its own tokens."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        return all_sum(values.clone(), group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
