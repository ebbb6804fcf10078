"""Ring attention: rectangles that cover exactly the causal pairs of each document, and training as in one process."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.helpers.parallel import ONE, SGD, assert_same, model, run
from toolkit.plans.plan import Plan
from toolkit.plans.split_verdicts import Axes
from toolkit.recipe.model_section import Model
from toolkit.runtime.models.documents import Documents
from toolkit.runtime.proofs.coverage import tiny_model
from toolkit.runtime.proofs.split_proof import prove
from toolkit.runtime.sharding.ring import use_flash_3
from toolkit.runtime.sharding.ring_blocks import Block, Reach, Sees, blocks, zigzag

RING = Plan(strategy="sequence_parallel", cp=2, micro_batch=2, grad_accum=2, precision="fp32", zero_stage=1)


def covered(documents: Documents, ranks: int, reach: Reach) -> torch.Tensor:
    """How often each pair of a query and a key is computed: rows × queries × keys."""
    rows, length = documents.numbers(torch.device("cpu")).shape
    seen = torch.zeros(rows, length, length, dtype=torch.long)
    places = [torch.cat([torch.tensor(chunk) for chunk in zigzag(length, ranks, rank)]) for rank in range(ranks)]
    for own, other in itertools.product(range(ranks), repeat=2):
        for one in blocks(documents, ranks, own, other, reach):
            queries, keys = places[own][one.queries], places[other][one.keys]
            pairs = torch.ones(len(queries), len(keys), dtype=torch.long)
            shaped = {Sees.ALL: pairs, Sees.EARLIER: pairs.tril(), Sees.LATER: pairs.triu()}[one.sees]
            for row in range(*one.rows.indices(rows)):
                seen[row, queries[:, None], keys[None, :]] += shaped
    return seen


@pytest.mark.parametrize("lengths", [[[16], [16]], [[5, 8, 3], [1, 2, 13]]])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 7, 12, 40])
def test_blocks_are_the_causal_pairs_of_documents(lengths: list[list[int]], ranks: int, window: int | None) -> None:
    documents = Documents.of_lengths([one for row in lengths for one in row], len(lengths))
    numbers, places = documents.numbers(torch.device("cpu")), torch.arange(16)
    expected = (numbers[:, :, None] == numbers[:, None, :]) & torch.ones(16, 16, dtype=torch.bool).tril()
    expected &= places[:, None] - places < (window or 16)
    assert torch.equal(covered(documents, ranks, Reach(window=window)), expected.long())


def test_blocks_in_both_directions_are_all_pairs_of_documents() -> None:
    documents = Documents.of_lengths([5, 8, 3, 1, 2, 13], 2)
    numbers = documents.numbers(torch.device("cpu"))
    expected = numbers[:, :, None] == numbers[:, None, :]
    assert torch.equal(covered(documents, 4, Reach(causal=False)), expected.long())


@pytest.mark.parametrize("window", [None, 1, 3, 4, 6, 9])
def test_a_window_reaches_from_either_answer_into_their_prompt(window: int | None) -> None:
    documents = Documents.of_pairs([6, 5, 5, 3, 7, 6], 2)
    number, place = torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long)
    for row, (prompt, first, second) in enumerate([(6, 5, 5), (3, 7, 6)]):
        number[row] = torch.tensor([0] * prompt + [1] * first + [2] * second)
        place[row] = torch.tensor([*range(prompt), *range(prompt, prompt + first), *range(prompt, prompt + second)])
    apart = place[:, :, None] - place[:, None, :]
    related = (number[:, :, None] == number[:, None, :]) | (number[:, None, :] == 0)
    expected = related & (apart >= 0) & (apart < (window or 16))
    assert torch.equal(covered(documents, 2, Reach(window=window)), expected.long())


def work(one: Block) -> int:
    """Twice the pairs of a block, without its diagonal."""
    return (one.queries.stop - one.queries.start) * (one.keys.stop - one.keys.start) * (1 + (one.sees is Sees.ALL))


@pytest.mark.parametrize("ranks", [2, 4])
def test_causal_work_is_even(ranks: int) -> None:
    documents = Documents.of_lengths([64], 1)
    total = [
        sum(work(one) for other in range(ranks) for one in blocks(documents, ranks, own, other, Reach()))
        for own in range(ranks)
    ]
    assert len(set(total)) == 1


@pytest.mark.parametrize(("kind", "cp", "sp"), [("qwen3", 2, 1), ("gpt_neox", 4, 1), ("llama", 2, 2)])
def test_a_ring_is_exact(kind: str, cp: int, sp: int) -> None:
    verdict = prove(tiny_model(kind), Axes(1, 1, sp, cp=cp))
    assert verdict.ok, verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize(("cp", "sp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["camembert", "bart", "bigbird_pegasus", "marian"])
def test_models_that_number_tokens_themselves_are_exact(kind: str, cp: int, sp: int) -> None:
    """By the padding id, by the shape of what they see, and by positions that they have counted."""
    assert prove(tiny_model(kind), Axes(1, 1, sp, cp=cp)).ok


def test_a_ring_in_a_pipeline_is_exact() -> None:
    verdict = prove(tiny_model("llama"), Axes(1, 2, 2, cp=2))
    assert verdict.ok, verdict.reason


def test_flash_attention_3_is_refused_where_its_package_is_missing() -> None:
    assert "flash_attn_interface" in use_flash_3()


def test_a_ring_of_tensor_shards_that_share_tokens_is_exact() -> None:
    verdict = prove(tiny_model("llama"), Axes(2, 1, 1, cp=2, sequence_sharded=True))
    assert verdict.ok, verdict.reason


def test_what_a_ring_lacks_is_refused_by_name() -> None:
    verdict = prove(tiny_model("doge"), Axes(1, 1, 1, cp=2))
    assert not verdict.ok
    assert "computes with the mask of all pairs of tokens itself" in verdict.reason


@pytest.mark.parametrize(
    ("kind", "sp"), [("bloom", 1), ("bloom", 2), ("falcon", 1), ("gptj", 1), ("gpt_neo", 1), ("gemma2", 1)]
)
def test_attention_by_code_of_its_own_and_capped_scores_are_exact(kind: str, sp: int) -> None:
    """ALiBi by the places of all tokens, local layers of GPT-Neo with their window, Gemma 2's soft cap."""
    verdict = prove(tiny_model(kind), Axes(1, 1, sp, cp=2))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(
    ("kind", "cp", "sp"), [("mistral", 4, 1), ("gemma3_text", 2, 1), ("gpt_oss", 2, 2), ("bert", 2, 1)]
)
def test_windows_sinks_and_both_directions_are_exact(kind: str, cp: int, sp: int) -> None:
    verdict = prove(tiny_model(kind), Axes(1, 1, sp, cp=cp))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("kind", ["bloom", "gpt_neo"])
def test_real_ranks_use_the_ring_where_attention_is_code_of_its_own(kind: str) -> None:
    """In a run the model and the one inside it have configs of their own; both must name the ring."""
    assert_same(run(model(kind), ONE, SGD, "full"), run(model(kind), RING, SGD, "full"), loss=1e-6, norm=2e-6)


@pytest.mark.parametrize(
    ("section", "data", "recompute"),
    [
        (model("llama"), "packed", "selective"),
        (model("llama"), "padded", "full"),
        (model("gpt_oss", sliding_window=5), "packed", "none"),
    ],
    ids=["packed", "padded", "window and sinks"],
)
def test_real_ranks_train_as_one_process(section: Model, data: str, recompute: str) -> None:
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
