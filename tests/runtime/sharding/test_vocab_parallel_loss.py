"""The loss over logits in shards is that over whole logits, and it is used only where logits are the head's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks.harness.tiny_llama import TINY_LLAMA
from toolkit.recipe.model_section import Model
from toolkit.runtime.models.loss import summed_loss
from toolkit.runtime.models.micro_batch import IGNORE
from toolkit.runtime.models.parameter_shards import shares
from toolkit.runtime.models.tiny_models import tiny_of_type
from toolkit.runtime.proofs.thread_ranks import thread_groups
from toolkit.runtime.sharding.vocab_parallel_loss import VocabularyLoss, follows_head


@pytest.mark.parametrize(("vocabulary", "ranks"), [(12, 2), (13, 4)])
def test_loss_and_gradients_are_those_of_whole_logits(vocabulary: int, ranks: int) -> None:
    torch.manual_seed(0)
    whole = (30 * torch.randn(2, 5, vocabulary)).requires_grad_()
    labels = torch.randint(0, vocabulary, (2, 5))
    labels[0, 2:] = IGNORE
    expected = summed_loss(whole, labels)
    (3 * expected).backward()  # type: ignore[no-untyped-call]
    pieces = [piece.detach().requires_grad_() for piece in whole.split(shares(vocabulary, ranks), -1)]

    def one(rank: int) -> torch.Tensor:
        loss = VocabularyLoss(groups[rank], vocabulary)(pieces[rank], labels)
        (3 * loss).backward()  # type: ignore[no-untyped-call]
        return loss

    groups = thread_groups(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        losses = list(pool.map(one, range(ranks)))
    assert whole.grad is not None
    for rank, piece in enumerate(whole.grad.split(shares(vocabulary, ranks), -1)):
        torch.testing.assert_close(losses[rank], expected)
        torch.testing.assert_close(pieces[rank].grad, piece)


def test_the_likeliest_token_is_found_among_all_ranks() -> None:
    whole = torch.tensor([[[1.0, 5.0, 5.0, 0.0], [0.0, 1.0, 2.0, 3.0], [9.0, 1.0, 2.0, 9.0], [9.0, 1.0, 2.0, 3.0]]])
    labels = torch.tensor([[1, 3, 3, IGNORE]])
    groups, pieces = thread_groups(2), whole.split(2, -1)

    def one(rank: int) -> tuple[list[int], int]:
        loss = VocabularyLoss(groups[rank], 4)
        return loss.likeliest(pieces[rank])[0].tolist(), int(loss.num_correct(pieces[rank], labels))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, range(2))) == [(whole.argmax(-1)[0].tolist(), 2)] * 2
    assert int(summed_loss.num_correct(whole, labels)) == 2


def test_no_counted_token_is_no_loss() -> None:
    logits = torch.randn(1, 3, 4, requires_grad=True)
    loss = VocabularyLoss(thread_groups(1)[0], 4)(logits, torch.full((1, 3), IGNORE))
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_scaled_and_capped_logits_follow_the_head() -> None:
    for kind in ("llama", "gemma2", "granite", "cohere"):
        assert follows_head(Model(config=tiny_of_type(kind), init="scratch", precision="fp32")), kind


def test_other_logits_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    original = LlamaForCausalLM.forward

    def normalised(*args: object, **kwargs: object) -> object:
        output = original(*args, **kwargs)
        output.logits = output.logits.log_softmax(-1)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", normalised)
    assert not follows_head(Model(config=TINY_LLAMA, init="scratch", precision="fp32"))
