"""Preference objectives: losses of pairs of documents, from the log-probabilities of their answers.

Each pair counts once, whatever its length, and the global batch is averaged over its pairs. So the loss does not depend
on how pairs are split over ranks and micro-batches. Written by hand: TRL's trainers compute these losses from complete
logits, in one process per replica.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from toolkit.recipe.objective_sections import Objective, Preference
from toolkit.runtime.models.loss import Loss
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch

FIGURES = ("chosen_reward", "rejected_reward", "margin", "accuracy", "chosen_logp", "rejected_logp")
"""What is reported per step, averaged over pairs."""


@dataclass(frozen=True)
class Pairs:
    """Log-probabilities of the answers of all pairs of a micro-batch; dimension 1 is (chosen, rejected)."""

    logps: torch.Tensor
    counts: torch.Tensor
    """Tokens of each answer, at least 1."""
    reference: torch.Tensor
    present: torch.Tensor
    """1 for a pair, 0 for padding."""

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


class PreferenceLoss:
    """`Loss` of pairs, around the loss that gives each token's cross-entropy."""

    def __init__(self, inner: Loss, objective: Objective, settings: Preference) -> None:
        self._inner = inner
        self._objective = objective
        self._settings = settings.of(objective)
        self._micro: MicroBatch | None = None
        self._figures: torch.Tensor | None = None
        self.recorded: list[torch.Tensor] | None = None
        """If it is a list: log-probabilities of the documents of every micro-batch are appended."""

    def expect(self, micro: MicroBatch) -> None:
        """The micro-batch of the next forward pass."""
        self._inner.expect(micro)
        self._micro = micro

    def per_token(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self._inner.per_token(logits, labels)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        pairs = self._pairs(logits, labels)
        losses = _LOSSES[self._objective](pairs, self._settings)
        if self._settings.sft_weight:
            losses = losses - self._settings.sft_weight * pairs.mean_logps[:, 0]
        if self.recorded is not None:
            self.recorded.append(pairs.logps.detach().flatten())
        if torch.is_grad_enabled():
            self._note(pairs)
        return (losses * pairs.present).sum()

    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Pairs whose chosen answer has the larger reward."""
        pairs = self._pairs(logits, labels)
        return ((pairs.ahead(self._rewards(pairs)) > 0) * pairs.present).sum().long()

    def take_figures(self) -> torch.Tensor | None:
        """Sums over the pairs since the last call, in the order of `FIGURES`; None if this rank has computed none."""
        found, self._figures = self._figures, None
        return found

    def _pairs(self, logits: torch.Tensor, labels: torch.Tensor) -> Pairs:
        micro = self._micro
        assert micro is not None, "the loss of pairs needs the micro-batch before the forward pass"
        assert micro.documents is not None, "the loss of pairs needs the bounds of documents"
        bounds = micro.documents.bounds.long()
        logps = -_by_document(self._inner.per_token(logits, labels).flatten(), bounds)
        counts = _by_document((labels != IGNORE).flatten().to(logps.dtype), bounds)
        reference = torch.zeros_like(logps) if micro.reference is None else micro.reference.to(logps.dtype)
        halves = [tensor.view(-1, 2) for tensor in (logps, counts, reference)]
        present = (halves[1] > 0).all(1).to(logps.dtype)
        return Pairs(halves[0], halves[1].clamp_min(1), halves[2], present)

    def _rewards(self, pairs: Pairs) -> torch.Tensor:
        ahead = (pairs.logps - pairs.reference).detach()
        return _beta(self._settings) * (ahead / pairs.counts if self._objective in _PER_TOKEN else ahead)

    @torch.no_grad()
    def _note(self, pairs: Pairs) -> None:
        rewards, present = self._rewards(pairs), pairs.present
        ahead = pairs.ahead(rewards)
        rows = [rewards[:, 0], rewards[:, 1], ahead, (ahead > 0).to(ahead.dtype), pairs.logps[:, 0], pairs.logps[:, 1]]
        sums = torch.stack([(row * present).sum() for row in rows])
        self._figures = sums if self._figures is None else self._figures + sums


def _by_document(values: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Sums of the values of each document. `unsafe`: the bounds are known to be right, and need not be read."""
    return torch.segment_reduce(values, "sum", offsets=bounds, unsafe=True)
