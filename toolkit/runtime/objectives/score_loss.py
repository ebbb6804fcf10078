"""Losses over scores of texts: reward models and rankers, and how good a ranking is.

A sample is a group of rows, and the model has a head with one output per row. Each sample counts once, so the mean over
the global batch does not depend on how it is split.
"""

from __future__ import annotations

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from toolkit.recipe.objective_sections import Preference, Rank
from toolkit.runtime.distributed.process_group import all_sum, device
from toolkit.runtime.models.loss import Loss
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.runtime.objectives.objective import Figures


class RewardLoss:
    """Bradley-Terry: the chosen text of a pair gets the larger score, by the margin of the data if there is one."""

    def __init__(self, settings: Preference) -> None:
        self.figures = Figures(("chosen_reward", "rejected_reward", "margin", "accuracy"))
        self._center = settings.of("reward").center_weight or 0.0
        self._margins: torch.Tensor | None = None

    def expect(self, micro: MicroBatch) -> None:
        """The micro-batch of the next forward pass."""
        self._margins = None if micro.scores is None else micro.scores[:, 0]

    def per_token(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of every pair."""
        rewards = scores_of(logits, labels)
        ahead = rewards[:, 0] - rewards[:, 1]
        if self._margins is not None:
            ahead = ahead - self._margins.to(ahead.dtype)
        return -logsigmoid(ahead) + self._center * rewards.sum(1) ** 2

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        present = (labels != IGNORE).to(torch.float32)
        if torch.is_grad_enabled():
            self._note(scores_of(logits.detach(), labels), present)
        return (self.per_token(logits, labels) * present).sum()

    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Pairs whose chosen text has the larger reward."""
        rewards = scores_of(logits, labels)
        return ((rewards[:, 0] > rewards[:, 1]) & (labels != IGNORE)).sum()

    def _note(self, rewards: torch.Tensor, present: torch.Tensor) -> None:
        chosen, rejected = rewards[:, 0], rewards[:, 1]
        values = {"chosen_reward": chosen, "rejected_reward": rejected, "margin": chosen - rejected}
        self.figures.add({**values, "accuracy": chosen > rejected}, present)


class RankLoss:
    """Cross-encoders: the candidates of a query get scores in the order of their relevance."""

    def __init__(self, settings: Rank) -> None:
        self.figures = Figures(("accuracy", "mrr", "ndcg"))
        self.held_out: Figures | None = None
        """If it is set: figures of evaluated queries are added."""
        self._pointwise = settings.loss == "pointwise"
        self._relevance: torch.Tensor | None = None

    def expect(self, micro: MicroBatch) -> None:
        """The micro-batch of the next forward pass."""
        self._relevance = micro.scores

    def per_token(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of every query."""
        assert self._relevance is not None, "candidates need their relevance"
        scores, absent = scores_of(logits, labels), self._relevance < 0
        wanted = self._relevance.clamp_min(0).to(scores.dtype)
        if self._pointwise:
            losses = binary_cross_entropy_with_logits(scores, wanted, reduction="none").masked_fill(absent, 0.0)
            return losses.sum(1) / (~absent).sum(1)
        logps = scores.masked_fill(absent, -torch.inf).log_softmax(1).masked_fill(absent, 0.0)
        return -(wanted / wanted.sum(1, keepdim=True).clamp_min(1e-30) * logps).sum(1)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        present = (labels != IGNORE).to(torch.float32)
        figures = self.figures if torch.is_grad_enabled() else self.held_out
        if figures is not None:
            assert self._relevance is not None
            found = ranking_figures(scores_of(logits.detach(), labels), self._relevance)
            figures.add({**found, "queries": torch.ones_like(present)}, present)
        return (self.per_token(logits, labels) * present).sum()

    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Queries whose first candidate is among the most relevant ones."""
        assert self._relevance is not None
        first = ranking_figures(scores_of(logits, labels), self._relevance)["accuracy"]
        return (first.bool() & (labels != IGNORE)).sum()


class RankMeasures:
    """MRR and nDCG of an evaluation."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    def begin(self) -> None:
        """Before the first batch of an evaluation."""
        if isinstance(self._loss, RankLoss):
            self._loss.held_out = Figures(("mrr", "ndcg", "queries"))

    def finish(self) -> dict[str, float]:
        """After the last batch. Collective: earlier stages of a pipeline have none, tensor ranks have the same."""
        found = torch.zeros(3, device=device())
        if isinstance(self._loss, RankLoss) and self._loss.held_out is not None:
            own, self._loss.held_out = self._loss.held_out.take(), None
            found = found if own is None else own
        mrr, ndcg, queries = all_sum(found.double()).tolist()
        return {"mrr": mrr / max(queries, 1.0), "ndcg": ndcg / max(queries, 1.0)}


def scores_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Scores by sample and row, in at least single precision."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.reshape(len(labels), -1)


def ranking_figures(scores: torch.Tensor, relevance: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of each query: whether its best candidate is first, reciprocal rank of the first relevant one, and nDCG."""
    ordered = scores.masked_fill(relevance < 0, -torch.inf).argsort(dim=1, descending=True, stable=True)
    gains = relevance.clamp_min(0).to(scores.dtype).gather(1, ordered)
    places = torch.arange(gains.shape[1], device=gains.device)
    first = (gains > 0).to(torch.uint8).argmax(1)
    ideal = gains.sort(1, descending=True).values
    return {
        "accuracy": (gains[:, 0] == ideal[:, 0]).to(scores.dtype),
        "mrr": 1 / (first + 1.0),
        "ndcg": (gains * discount(places)).sum(1) / (ideal * discount(places)).sum(1).clamp_min(1e-30),
    }


def discount(places: torch.Tensor) -> torch.Tensor:
    """What a relevant candidate at each place, counted from 0, contributes to a discounted gain."""
    return 1 / torch.log2(places + 2.0)
