"""InfoNCE over the negatives of the whole global batch, with the gradients of one process.

Embeddings are computed twice (GradCache): first without gradients for the global batch, which gives the loss and its
gradient by every embedding; then micro-batch by micro-batch, each with its own part of that gradient. So memory does
not grow with the batch, and the result does not depend on micro-batches or replicas. Written by hand: the cached loss
of sentence-transformers (6.2) runs the model's passes itself, which the engines do here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from toolkit.recipe.objective_sections import Contrastive
from toolkit.runtime.distributed.process_group import all_sum, device
from toolkit.runtime.models.loss import Loss
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.runtime.objectives.objective import Figures, Total
from toolkit.runtime.objectives.score_loss import discount

CUTOFFS = (1, 10, 100)
"""`k` of recall@k in evaluations."""
BLOCK_QUERIES = 1024
"""Queries whose ranks are computed at a time."""


@dataclass(frozen=True)
class Embedded:
    """Embeddings of a global batch: samples of a query, its positive, and hard negatives."""

    vectors: torch.Tensor
    """[samples, texts of a sample, size]"""
    keys: torch.Tensor
    """[samples, texts of a sample]: equal for equal texts."""
    present: torch.Tensor
    """[samples]: whether a sample is not padding."""


class ContrastiveLoss:
    """The positive of each query against all positives and hard negatives of the global batch.

    A candidate with the same text as the query's own positive is not a negative.
    """

    def __init__(self, settings: Contrastive, replica: int, replicas: int, *, counts: bool = True) -> None:
        """`counts`: whether this rank counts its texts. Of ranks that share the tokens of texts, one does."""
        self._settings = settings
        self._counts = counts
        self._replica, self._replicas = replica, replicas
        self.figures = Figures(("accuracy", "positive_similarity"))
        self.recorded: list[torch.Tensor] | None = None
        self.kept: list[Embedded] | None = None
        """If it is a list: embeddings of every global batch are appended."""
        self._micro: MicroBatch | None = None
        self._ready: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(gradient by each embedding, loss of each query) of the micro-batches to come."""

    def expect(self, micro: MicroBatch) -> None:
        """The micro-batch of the next forward pass."""
        self._micro = micro

    def per_token(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Embeddings of all rows."""
        assert self._micro is not None
        return pooled(logits, self._micro, self._settings.pooling)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        vectors = self.per_token(logits, labels)
        if self.recorded is not None:
            self.recorded.append(vectors.detach())
            return vectors.sum() * 0
        gradient, losses = self._ready.pop(0)
        known = (vectors * gradient).sum()
        return losses.sum() + known - known.detach()

    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Unused: `settle` counts."""
        return torch.zeros((), dtype=torch.long, device=labels.device)

    def settle(self, batch: Sequence[MicroBatch], total: Total) -> torch.Tensor | None:
        """Gather the embeddings of the global batch; return loss and hits of this rank's queries. See `TwoPass`."""
        if not self.recorded:
            return None
        found = self._gathered(batch, torch.cat(self.recorded), total)
        if self.kept is not None:
            self.kept.append(found)
        samples = len(found.present) // self._replicas
        own = slice(self._replica * samples, (self._replica + 1) * samples)
        vectors = found.vectors.requires_grad_()
        with torch.enable_grad():
            losses, hits, similarity = self._losses(Embedded(vectors, found.keys, found.present), own)
            (gradient,) = torch.autograd.grad(losses.sum(), vectors)
        share = float(self._counts)
        gradient = share * total(share * gradient)[own]  # every rank that counts has the part of its own queries
        losses, hits = share * losses.detach(), share * hits.double()
        rows = gradient.reshape(len(batch), -1, gradient.shape[-1])
        self._ready = list(zip(rows, losses.view(len(batch), -1), strict=True))
        self.figures.take()  # those of an evaluation are not of a step
        self.figures.add({"accuracy": hits, "positive_similarity": similarity}, share * found.present[own].float())
        return torch.stack([losses.double().sum(), hits.sum()])

    def _gathered(self, batch: Sequence[MicroBatch], vectors: torch.Tensor, total: Total) -> Embedded:
        """Embeddings of all replicas. Slots of others, and of ranks that do not count, are zeros, so a sum gathers."""
        where = vectors.device
        present = torch.cat([micro.labels != IGNORE for micro in batch]).to(where, torch.long, non_blocking=True)
        keys = torch.cat([micro.keys for micro in batch if micro.keys is not None]).to(where, non_blocking=True)
        own = vectors.reshape(len(present), -1, vectors.shape[-1])

        def everywhere(values: torch.Tensor) -> torch.Tensor:
            whole = values.new_zeros(self._replicas, *values.shape)
            if self._counts:
                whole[self._replica] = values
            return total(whole).flatten(0, 1)

        return Embedded(everywhere(own), everywhere(keys), everywhere(present).bool())

    def _losses(self, whole: Embedded, own: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(loss, whether the positive is first, its similarity) of this rank's queries; 0 for padding."""
        settings, size = self._settings, whole.vectors.shape[-1]
        present = whole.present[own]
        first = own.start
        places = torch.arange(first, first + len(present), device=present.device)
        losses = torch.zeros(len(present), device=present.device)
        sizes = settings.matryoshka or (size,)
        for width in sizes:
            vectors = whole.vectors[..., :width]
            vectors = normalize(vectors, dim=-1) if settings.similarity == "cosine" else vectors
            queries, candidates = vectors[:, 0], vectors[:, 1:].transpose(0, 1).flatten(0, 1)
            scores = queries[own] @ candidates.T / settings.temperature
            scores = scores.masked_fill(_no_negative(whole, own), -torch.inf)
            found = -scores.log_softmax(1).gather(1, places[:, None])[:, 0]
            if settings.both_ways:
                back = candidates[own] @ queries.T / settings.temperature
                back = back.masked_fill(_no_negative(whole, own)[:, : len(queries)], -torch.inf)
                found = (found - back.log_softmax(1).gather(1, places[:, None])[:, 0]) / 2
            losses = losses + torch.where(present, found, 0.0) / len(sizes)
        hits = (scores.detach().argmax(1) == places) & present
        similarity = scores.detach().gather(1, places[:, None])[:, 0] * settings.temperature
        return losses, hits, torch.where(present, similarity, 0.0)


def _no_negative(whole: Embedded, own: slice) -> torch.Tensor:
    """[own queries, candidates]: padding, and what has the text of the query's own positive, but for itself."""
    keys = whole.keys[:, 1:].T.flatten()
    absent = ~whole.present.repeat(whole.keys.shape[1] - 1)
    mask = (whole.keys[own, 1, None] == keys) | absent
    places = torch.arange(own.start, own.start + len(mask), device=mask.device)
    mask[torch.arange(len(mask), device=mask.device), places] = False
    return mask


def pooled(hidden: torch.Tensor, micro: MicroBatch, pooling: str) -> torch.Tensor:
    """One vector per row, in at least single precision; rows are padded on the right."""
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    if pooling == "cls":
        return wide[:, 0]
    assert micro.attention_mask is not None
    mask = micro.attention_mask.to(wide.dtype)
    if pooling == "last":
        last = micro.attention_mask.sum(1).long() - 1
        return wide[torch.arange(len(wide), device=wide.device), last]
    return (wide * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class RetrievalMeasures:
    """Recall@k, MRR and nDCG@10 of an evaluation: each query against all different positives and hard negatives."""

    def __init__(self, loss: Loss, settings: Contrastive) -> None:
        self._loss = loss
        self._settings = settings

    def begin(self) -> None:
        """Before the first batch of an evaluation."""
        if isinstance(self._loss, ContrastiveLoss):
            self._loss.kept = []

    def finish(self) -> dict[str, float]:
        """After the last batch. Collective: earlier stages of a pipeline have no embeddings."""
        names = [*(f"recall@{k}" for k in CUTOFFS), "mrr", "ndcg@10"]
        found = torch.zeros(len(names) + 1, dtype=torch.float64, device=device())
        if isinstance(self._loss, ContrastiveLoss) and self._loss.kept:
            ranks = self._ranks(self._loss.kept)
            values = [(ranks < k).double().mean() for k in CUTOFFS]
            gains = torch.where(ranks < 10, discount(ranks), 0.0)
            found[:-1] = torch.stack([*values, (1 / (ranks + 1.0)).double().mean(), gains.double().mean()])
            found[-1] = 1.0
        if isinstance(self._loss, ContrastiveLoss):
            self._loss.kept = None
        sums = all_sum(found)
        return dict(zip(names, (sums[:-1] / sums[-1].clamp_min(1)).tolist(), strict=True))

    def _ranks(self, kept: list[Embedded]) -> torch.Tensor:
        """How many other candidates are at least as near to each query as its positive is."""
        vectors = torch.cat([batch.vectors.detach()[batch.present] for batch in kept])
        keys = torch.cat([batch.keys[batch.present] for batch in kept])
        if self._settings.similarity == "cosine":
            vectors = normalize(vectors, dim=-1)
        flat, flat_keys = vectors[:, 1:].flatten(0, 1), keys[:, 1:].flatten()
        unique, inverse = torch.unique(flat_keys, return_inverse=True)
        firsts = torch.full((len(unique),), len(flat_keys), device=keys.device)
        firsts.scatter_reduce_(0, inverse, torch.arange(len(flat_keys), device=keys.device), "amin")
        candidates = flat[firsts]
        target = torch.searchsorted(unique, keys[:, 1].contiguous())
        found = []
        for start in range(0, len(vectors), BLOCK_QUERIES):
            scores = vectors[start : start + BLOCK_QUERIES, 0] @ candidates.T
            own = scores.gather(1, target[start : start + BLOCK_QUERIES, None])
            found.append((scores >= own).sum(1) - 1)
        return torch.cat(found)
