"""InfoNCE: the loss and gradients of a plain implementation, whatever the micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from toolkit.recipe.objective_sections import Contrastive
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.runtime.objectives.contrastive_loss import ContrastiveLoss, RetrievalMeasures, pooled

SAMPLES, TEXTS, TOKENS, SIZE = 6, 3, 4, 8

pytestmark = pytest.mark.slow


def batches(count: int, keys: torch.Tensor, labels: torch.Tensor) -> list[MicroBatch]:
    rows = torch.arange(SAMPLES * TEXTS)[:, None].expand(-1, TOKENS)
    mask = (torch.arange(TOKENS) < 1 + (torch.arange(SAMPLES * TEXTS) % TOKENS)[:, None]).long()
    parts = zip(*(each.chunk(count) for each in (rows, labels, mask, keys)), strict=True)
    return [MicroBatch(ids, own, seen, keys=names) for ids, own, seen, names in parts]


def trained(table: torch.Tensor, settings: Contrastive, count: int, keys: torch.Tensor, labels: torch.Tensor) -> float:
    """Loss of a batch of which each row is looked up in a table; its gradient is that of the table."""
    loss = ContrastiveLoss(settings, 0, 1)
    loss.recorded = []
    micros = batches(count, keys, labels)
    for micro in micros:
        loss.expect(micro)
        assert micro.input_ids is not None
        loss(table[micro.input_ids], micro.labels)
    loss.settle(micros, lambda values: values)
    loss.recorded = None
    total = torch.zeros((), dtype=table.dtype)
    for micro in micros:
        loss.expect(micro)
        assert micro.input_ids is not None
        found = loss(table[micro.input_ids], micro.labels)
        found.backward()
        total += found.detach()
    return float(total)


def plain(table: torch.Tensor, settings: Contrastive, keys: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The same in one pass."""
    kept = labels != IGNORE
    whole = MicroBatch(None, labels, torch.cat([m.attention_mask for m in batches(1, keys, labels)]))  # type: ignore[misc]
    vectors = pooled(table[torch.arange(SAMPLES * TEXTS)[:, None].expand(-1, TOKENS)], whole, settings.pooling)
    grouped, names = vectors.view(SAMPLES, TEXTS, SIZE)[kept], keys[kept]
    losses = []
    for size in settings.matryoshka or (SIZE,):
        short = normalize(grouped[..., :size], dim=-1)
        candidates = torch.cat([short[:, place] for place in range(1, TEXTS)])
        scores = short[:, 0] @ candidates.T / settings.temperature
        same = names[:, 1:2] == torch.cat([names[:, place] for place in range(1, TEXTS)])
        own = torch.eye(len(grouped), len(candidates), dtype=torch.bool)
        scores = scores.masked_fill(same & ~own, -torch.inf)
        found = cross_entropy(scores, torch.arange(len(grouped)), reduction="sum")
        if settings.both_ways:
            back = (short[:, 1] @ short[:, 0].T / settings.temperature).masked_fill(
                (same & ~own)[:, : len(grouped)], -torch.inf
            )
            found = (found + cross_entropy(back, torch.arange(len(grouped)), reduction="sum")) / 2
        losses.append(found)
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    "settings",
    [
        Contrastive(),
        Contrastive(pooling="last", temperature=0.3, both_ways=True),
        Contrastive(pooling="cls", matryoshka=(2, 4, 8)),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_loss_and_gradients_are_those_of_one_pass(settings: Contrastive, count: int) -> None:
    keys = torch.arange(SAMPLES * TEXTS).view(SAMPLES, TEXTS)
    keys[4, 1] = keys[1, 1]  # two queries with one positive
    labels = torch.zeros(SAMPLES, dtype=torch.long)
    labels[5] = IGNORE
    tables = [torch.randn(SAMPLES * TEXTS, SIZE, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    for table in tables:
        table.requires_grad_()
    found = trained(tables[0], settings, count, keys, labels)
    expected = plain(tables[1], settings, keys, labels)
    expected.backward()
    assert found == pytest.approx(float(expected.detach()), rel=1e-5)
    torch.testing.assert_close(tables[0].grad, tables[1].grad, rtol=1e-4, atol=1e-5)
    assert float(tables[0].grad[15:].abs().max()) == 0, "a sample that is padding has no gradient"  # type: ignore[index]


def test_recall_is_measured_over_all_different_candidates() -> None:
    """Three queries, two of which look for the same text; the third one's positive is second."""
    settings = Contrastive(pooling="cls", similarity="dot")
    loss = ContrastiveLoss(settings, 0, 1)
    measures = RetrievalMeasures(loss, settings)
    measures.begin()
    vectors = torch.tensor([[[1.0, 0], [1, 0]], [[2, 0], [1, 0]], [[1, 0], [0.5, 1]]])
    micro = MicroBatch(None, torch.zeros(3, dtype=torch.long), keys=torch.tensor([[1, 7], [2, 7], [3, 8]]))
    loss.recorded = [vectors.flatten(0, 1)]
    loss.settle([micro], lambda values: values)
    found = measures.finish()
    assert found["recall@1"] == pytest.approx(2 / 3)
    assert found["recall@10"] == 1.0
    assert found["mrr"] == pytest.approx((1 + 1 + 1 / 2) / 3)
