"""Vocabulary-parallel cross-entropy: each tensor rank keeps its columns of the logits; none ever holds all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.recipe.model_section import Model
from toolkit.runtime.models.attention import without_gpu
from toolkit.runtime.models.build import build_model, load_config
from toolkit.runtime.models.loss import count_matches, in_training
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.runtime.models.parameter_shards import shares
from toolkit.runtime.models.tiny_models import tiny_config
from toolkit.runtime.sharding.collectives import TensorGroup

ELEMENTWISE = ("ToCopyBackward0", "MulBackward0", "DivBackward0", "TanhBackward0")
"""Element-wise operations that models apply to logits: casts, scales, caps."""


class VocabularyLoss:
    """`Loss` over this rank's columns of the logits. Collective over the tensor ranks."""

    def __init__(self, group: TensorGroup, vocabulary: int) -> None:
        self._group = group
        self.vocabulary = vocabulary
        self.smoothing = 0.0
        """Share of every label that is spread evenly over the vocabulary."""
        sizes = shares(vocabulary, group.ranks)
        self.start = sum(sizes[: group.index])
        """First token id of this rank's columns."""

    def expect(self, micro: MicroBatch) -> None:
        """Not needed: the loss gets logits and labels together."""

    def per_token(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        columns = logits.flatten(0, 1)
        wide = columns if columns.dtype == torch.float64 else columns.float()
        spec = _Slice(self.start, self._group, in_training(self.smoothing), self.vocabulary)
        losses = _SlicedLoss.apply(wide, labels.flatten(), spec)  # type: ignore[no-untyped-call]
        return losses.view(labels.shape)  # type: ignore[no-any-return]

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.per_token(logits, labels).sum()

    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return count_matches(self.likeliest(logits), labels)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """The token with the largest logit over all ranks' columns; of equals the first, as in `argmax`."""
        values, places = logits.max(-1)
        others = values < self._group.largest(values)
        return -self._group.largest(-(places + self.start).masked_fill(others, torch.iinfo(places.dtype).max))


@dataclass(frozen=True)
class _Slice:
    start: int
    group: TensorGroup
    smoothing: float
    vocabulary: int


class _SlicedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, spec: _Slice) -> torch.Tensor:
        start, group = spec.start, spec.group
        top = group.largest(logits.amax(-1))
        weights = (logits - top[:, None]).exp_()
        own = (labels >= start) & (labels < start + logits.shape[1])
        places = (labels - start).masked_fill(~own, 0)[:, None]
        target = logits.gather(1, places)[:, 0].masked_fill(~own, 0.0) * (1.0 - spec.smoothing)
        if spec.smoothing:
            target = target + logits.sum(-1) * (spec.smoothing / spec.vocabulary)
        total, target = group.sum(torch.stack([weights.sum(-1), target]))
        counted = labels != IGNORE
        ctx.save_for_backward(weights.div_(total[:, None]), places, own, counted)
        ctx.spec = spec
        lost: torch.Tensor = (total.log() + top - target) * counted
        return lost

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        probabilities, places, own, counted = ctx.saved_tensors
        smoothing, each = ctx.spec.smoothing, (counted * gradient)[:, None]
        found = (probabilities - smoothing / ctx.spec.vocabulary if smoothing else probabilities) * each
        found.scatter_add_(1, places, (smoothing - 1.0) * ((own & counted) * gradient).to(found.dtype)[:, None])
        return found, None, None


def head_name(model: PreTrainedModel) -> str | None:
    """Name of the module that computes the logits."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None) if head is not None else None


def follows_head(section: Model) -> bool:
    """Whether logits are the head's output up to element-wise operations; tried on a tiny model."""
    if section.task not in (None, "causal-lm"):
        return False
    try:
        config = tiny_config(load_config(section))
        model = build_model(
            Model(config=config, init="scratch", precision="fp32", attention=without_gpu(section.attention)), 0
        )
        made: list[torch.Tensor] = []
        model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: made.append(output))
        logits = model(input_ids=torch.ones((1, 8), dtype=torch.long), use_cache=False).logits
        return len(made) == 1 and logits.shape == made[0].shape and _reaches(logits.grad_fn, made[0].grad_fn)
    except Exception:  # another kind of model: its logits are gathered, which works for all
        return False


def _reaches(node: Any, target: Any) -> bool:
    while node is not target:
        inputs = [following for following, _ in node.next_functions if following is not None]
        if node.name() not in ELEMENTWISE or len(inputs) != 1:
            return False
        node = inputs[0]
    return True
