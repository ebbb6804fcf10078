"""Pairs that share their prompt: the results of complete documents, with fewer tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.pairs import pair_rows
from tests.helpers.parallel import model
from toolkit.errors import BadInput
from toolkit.runtime.data.packing import why_not_shared
from toolkit.runtime.data.pairs import PairRows
from toolkit.runtime.models.attention import forward
from toolkit.runtime.models.build import build_model
from toolkit.runtime.models.loss import summed_loss
from toolkit.runtime.models.micro_batch import IGNORE
from toolkit.runtime.objectives.preference_loss import pairs_of

LENGTHS = [(6, 5, 3), (2, 1, 6), (9, 4, 4), (1, 7, 2), (12, 1, 1), (3, 2, 8)]


def logps(samples: PairRows, section: Any) -> tuple[dict[tuple[int, ...], float], list[torch.Tensor]]:
    """Log-probability of each document by its counted tokens, and the gradients of a weighted sum of them."""
    torch.manual_seed(0)
    network = build_model(section, seed=0)
    found, total = {}, torch.zeros(())
    for row in range(len(samples)):
        micro = samples.batch(np.array([row])).located()
        pairs = pairs_of(summed_loss, micro, forward(network, micro).logits, micro.labels)
        spans = torch.split(micro.labels.flatten(), list(micro.documents.lengths))
        counted = [tuple(span[span != IGNORE].tolist()) for span in spans]
        answers = [tokens for tokens in counted if tokens]
        found |= dict(zip(answers, pairs.logps.flatten().tolist(), strict=True))
        total = total + (pairs.logps * torch.tensor([sum(tokens) / 100 for tokens in answers]).view(-1, 2)).sum()
    total.backward()
    return found, [parameter.grad for parameter in network.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("kind", "config"),
    [("llama", {}), ("mistral", {"sliding_window": 4}), ("gpt2", {})],
    ids=["rope", "window", "learned"],
)
def test_a_shared_prompt_changes_no_log_probability_and_no_gradient(kind: str, config: dict[str, Any]) -> None:
    section = model(kind, **config)
    once, repeated = (pair_rows(LENGTHS, 40, share=share) for share in (True, False))
    assert once.positions_used == repeated.positions_used - sum(prompt - 1 for prompt, *_ in LENGTHS)
    found, gradients = logps(once, section)
    expected, others = logps(repeated, section)
    assert found == {answer: pytest.approx(value, rel=1e-5) for answer, value in expected.items()}
    assert len(found) == 2 * len(LENGTHS)
    for own, other in zip(gradients, others, strict=True):
        assert torch.allclose(own, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_long_pairs_lose_the_end_of_their_longer_answer() -> None:
    samples = pair_rows([(5, 20, 4)], 16, share=True)
    micro = samples.batch(np.array([0]))
    assert micro.documents is not None
    assert micro.documents.lengths == (4, 8, 4), "5 - 1 shared tokens, and as much of both answers as fits"
    assert micro.weighed == 1


def test_a_prompt_that_leaves_no_room_is_refused_with_its_row() -> None:
    with pytest.raises(BadInput, match="made up, row 2: the prompt leaves no room for both answers in 8 tokens"):
        pair_rows([(3, 2, 2), (9, 2, 2)], 8, share=True)


@pytest.mark.parametrize(
    ("kind", "why"), [("llama", ""), ("mpt", "mpt"), ("mixtral", "routers of experts are balanced")]
)
def test_prompts_are_repeated_where_sharing_is_not_proven(kind: str, why: str) -> None:
    reason = why_not_shared(model(kind))
    assert reason.startswith(why) if why else not reason
