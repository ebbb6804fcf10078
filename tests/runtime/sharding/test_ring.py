"""Ring attention: rectangles that cover exactly the causal pairs of each document, and training as in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.parallel import ONE, SGD, assert_same, model, run
from toolkit.plans.plan import Plan
from toolkit.plans.split_verdicts import Axes
from toolkit.runtime.models.documents import Documents
from toolkit.runtime.proofs.coverage import tiny_model
from toolkit.runtime.proofs.split_proof import prove
from toolkit.runtime.sharding.ring import rectangles, use_flash_3, zigzag

RING = Plan(strategy="sequence_parallel", cp=2, micro_batch=2, grad_accum=2, precision="fp32", zero_stage=1)


@pytest.mark.parametrize("lengths", [[[16], [16]], [[5, 8, 3], [1, 2, 13]]])
@pytest.mark.parametrize("ranks", [2, 4])
def test_rectangles_are_the_causal_pairs_of_documents(lengths: list[list[int]], ranks: int) -> None:
    documents = Documents.of_lengths([one for row in lengths for one in row], len(lengths))
    numbers = documents.numbers(torch.device("cpu"))
    expected = (numbers[:, :, None] == numbers[:, None, :]) & torch.ones(16, 16, dtype=torch.bool).tril()
    seen = torch.zeros(2, 16, 16, dtype=torch.long)
    places = [torch.cat([torch.tensor(chunk) for chunk in zigzag(16, ranks, rank)]) for rank in range(ranks)]
    for own in range(ranks):
        for other in range(ranks):
            for one in rectangles(documents, ranks, own, other):
                queries, keys = places[own][one.queries], places[other][one.keys]
                pairs = torch.ones(len(queries), len(keys), dtype=torch.long)
                for row in range(*one.rows.indices(2)):
                    seen[row, queries[:, None], keys[None, :]] += pairs.tril() if one.causal else pairs
    assert torch.equal(seen, expected.long())


@pytest.mark.parametrize("ranks", [2, 4])
def test_causal_work_is_even(ranks: int) -> None:
    documents = Documents.of_lengths([64], 1)
    work = []
    for own in range(ranks):
        found = [one for other in range(ranks) for one in rectangles(documents, ranks, own, other)]
        sizes = [(one.queries.stop - one.queries.start) * (one.keys.stop - one.keys.start) for one in found]
        work.append(sum(size // 2 if one.causal else size for size, one in zip(sizes, found, strict=True)))
    assert len(set(work)) == 1


@pytest.mark.parametrize(("kind", "cp", "sp"), [("qwen3", 2, 1), ("gpt_neox", 4, 1), ("llama", 2, 2)])
def test_a_ring_is_exact(kind: str, cp: int, sp: int) -> None:
    verdict = prove(tiny_model(kind), Axes(1, 1, sp, cp=cp))
    assert verdict.ok, verdict.reason


def test_a_ring_in_a_pipeline_is_exact() -> None:
    verdict = prove(tiny_model("llama"), Axes(1, 2, 2, cp=2))
    assert verdict.ok, verdict.reason


def test_flash_attention_3_is_refused_where_its_package_is_missing() -> None:
    assert "flash_attn_interface" in use_flash_3()


def test_a_ring_of_tensor_shards_that_share_tokens_is_exact() -> None:
    verdict = prove(tiny_model("llama"), Axes(2, 1, 1, cp=2, sequence_sharded=True))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("kind", "words"), [("gemma2", "a soft cap"), ("gpt_oss", "sinks")])
def test_what_a_ring_lacks_is_refused_by_name(kind: str, words: str) -> None:
    verdict = prove(tiny_model(kind), Axes(1, 1, 1, cp=2))
    assert not verdict.ok
    assert words in verdict.reason


@pytest.mark.parametrize(("data", "recompute"), [("packed", "selective"), ("padded", "full")])
def test_real_ranks_train_as_one_process(data: str, recompute: str) -> None:
    section = model("llama")
    found = run(section, replace(RING, recompute=recompute), SGD, data)
    assert_same(run(section, ONE, SGD, data), found, loss=1e-6, norm=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "stage"), [({"cp": 2}, 1), ({"cp": 1, "sp": 2}, 2)])
def test_tensor_ranks_of_rings_and_exchanges(axes: dict[str, int], stage: int) -> None:
    section = model("qwen3")
    plan = replace(RING, strategy="hybrid", tp=2, zero_stage=stage, sequence_sharded=True, **axes)
    assert_same(run(section, ONE, SGD, "packed"), run(section, plan, SGD, "packed"), loss=1e-6, norm=2e-6)


@pytest.mark.slow
def test_rings_of_groups_that_exchange_heads() -> None:
    section = model("llama", num_key_value_heads=2)
    plan = replace(RING, sp=2, micro_batch=4, grad_accum=1, zero_stage=3)
    assert_same(run(section, ONE, SGD, "packed"), run(section, plan, SGD, "packed"), loss=1e-6, norm=2e-6)
