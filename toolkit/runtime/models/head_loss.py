"""Head and cross-entropy in one: logits exist for one block of the vocabulary at a time, never all of them.

The head's forward pass returns, per token, its loss and, without gradients, the likeliest next token. It stays a module
with its own weight, so ZeRO 3 gathers the weight for it as for any other. Written by hand, since DeepSpeed's chunked
loss (0.19.8) keeps the logits and their gradient, and Liger's (0.8) needs Triton and knows no slices of the
vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import cross_entropy, linear

from toolkit.errors import first_line
from toolkit.recipe.model_section import Model
from toolkit.runtime.models.attention import without_gpu
from toolkit.runtime.models.build import build_model, load_config
from toolkit.runtime.models.loss import count_matches, in_training
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.runtime.models.tiny_models import trial_config
from toolkit.runtime.models.trials import tried

BLOCK_ELEMENTS = 2**25
"""Logits of one block: 128 MiB in fp32."""
WHOLE_ELEMENTS = 2**27
"""In host memory, fewer logits than this are made at once: blocks are computed a second time in the backward pass."""
WORTH_SKIPPING = 0.9
"""In host memory, if fewer tokens than this share count (answers after prompts), only their logits are made."""
SUM_ELEMENTS = 2**26
"""Elements of the hidden states' gradient that are summed in fp32 at a time: 256 MiB."""


class Ranks(Protocol):
    """Ranks that hold slices of the vocabulary."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in a new tensor."""

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Maximum over ranks, in a new tensor."""


@dataclass(frozen=True)
class Transform:
    """What a model does to its logits: `cap · tanh(scale · x / cap)`."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The model's logits from the head's."""
        scaled = logits if self.scale == 1.0 else logits * self.scale
        return scaled if self.cap is None else (scaled / self.cap).tanh() * self.cap

    def derivative(self, transformed: torch.Tensor) -> torch.Tensor | float:
        """Of the transformed logits by the head's."""
        return self.scale if self.cap is None else (1 - (transformed / self.cap) ** 2) * self.scale

    @classmethod
    def of(cls, config: Any) -> Transform:
        """From the config's keys: those of Gemma, Granite and Cohere."""
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        return cls(scale, getattr(config, "final_logit_softcapping", None))


class HeadLoss:
    """`Loss` that the head itself has computed: the model's "logits" are losses and predicted tokens."""

    def __init__(
        self, transform: Transform, ranks: Ranks | None = None, start: int = 0, vocabulary: int | None = None
    ) -> None:
        self._transform = transform
        self._ranks = ranks
        self._start = start
        """First token id of this rank's slice of the vocabulary."""
        self._vocabulary = vocabulary
        """Columns on all ranks; None: those of the head."""
        self.smoothing = 0.0
        """Share of every label that is spread evenly over the vocabulary."""
        self._labels: torch.Tensor | None = None

    def expect(self, micro: MicroBatch) -> None:
        """The micro-batch of the next forward pass."""
        self._labels = micro.labels

    def per_token(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits[..., 0]

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits[..., 0].sum()

    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return count_matches(self.likeliest(logits), labels)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """The likeliest token after each token; ids are exact in fp32, which has 24 bits for them."""
        return logits[..., 1].long()

    def of_hidden(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Loss and prediction of every token, shaped as the hidden states with two instead of their width."""
        assert self._labels is not None, "the head's loss needs labels before the forward pass"
        rows, labels, self._labels = hidden.reshape(-1, hidden.shape[-1]), self._labels.flatten(), None
        elements = len(rows) * len(weight)
        if self._ranks is None and elements <= WHOLE_ELEMENTS and torch.is_grad_enabled() and _skips_prompts(labels):
            losses = self._counted(rows, weight, bias, labels)
            predicted = torch.zeros_like(losses)
        elif self._ranks is None and elements <= (WHOLE_ELEMENTS if hidden.device.type == "cpu" else BLOCK_ELEMENTS):
            losses, predicted = self._whole(rows, weight, bias, labels)
        else:
            share = in_training(self.smoothing)
            columns = self._vocabulary or len(weight)
            spec = _Spec(self._transform, self._ranks, self._start, not torch.is_grad_enabled(), share, columns)
            losses, predicted = _BlockLoss.apply(rows, weight, bias, labels, spec)  # type: ignore[no-untyped-call]
        return torch.stack([losses, predicted], -1).view(*hidden.shape[:-1], 2)

    def _counted(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
    ) -> torch.Tensor:
        """Losses of all tokens, from the logits of those that count."""
        places = (labels != IGNORE).nonzero()[:, 0]
        found, _ = self._whole(rows[places], weight, bias, labels[places])
        return found.new_zeros(len(labels)).index_put((places,), found)

    def _whole(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._transform(linear(rows, weight, bias))
        wide = logits if logits.dtype == torch.float64 else logits.float()
        share = in_training(self.smoothing)
        losses = cross_entropy(wide, labels, ignore_index=IGNORE, reduction="none", label_smoothing=share)
        return losses, torch.zeros_like(losses) if torch.is_grad_enabled() else logits.argmax(-1).to(losses.dtype)


def _skips_prompts(labels: torch.Tensor) -> bool:
    """Whether logits of uncounted tokens are worth leaving out. Only in host memory: a device would have to be read."""
    return labels.device.type == "cpu" and bool((labels != IGNORE).sum() < WORTH_SKIPPING * labels.numel())


@dataclass(frozen=True)
class _Spec:
    transform: Transform
    ranks: Ranks | None
    start: int
    predicts: bool
    smoothing: float
    vocabulary: int

    def logits(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The model's logits of some rows and columns, in fp32 or wider."""
        found = self.transform(linear(rows, weight, bias))
        return found if found.dtype == torch.float64 else found.float()

    def own(self, labels: torch.Tensor, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether each label is among these columns of this rank's slice, and its place there."""
        places = labels - (self.start + low)
        inside = (places >= 0) & (places < high - low)
        return inside, places.masked_fill(~inside, 0)[:, None]


def _blocks(total: int, size: int) -> Iterator[tuple[int, int]]:
    for low in range(0, total, size):
        yield low, min(low + size, total)


def _width(rows: int) -> int:
    """Columns of a block."""
    return max(256, BLOCK_ELEMENTS // max(1, rows))


def _columns(weight: torch.Tensor, rows: int) -> Iterator[tuple[int, int]]:
    """Blocks of the vocabulary; a rehearsal runs a few of them, since all are alike."""
    yield from _blocks(len(weight), _width(rows))


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        spec: _Spec,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        top = rows.new_full((len(rows),), float("-inf"), dtype=wide)
        total, target, best = torch.zeros_like(top), torch.zeros_like(top), torch.zeros_like(labels)
        kept = 1.0 - spec.smoothing
        for low, high in _columns(weight, len(rows)):
            logits = spec.logits(rows, weight[low:high], None if bias is None else bias[low:high])
            inside, places = spec.own(labels, low, high)
            target += logits.gather(1, places)[:, 0].masked_fill(~inside, 0.0) * kept
            if spec.smoothing:
                target += logits.sum(-1) * (spec.smoothing / spec.vocabulary)
            largest, where = logits.max(-1) if spec.predicts else (logits.amax(-1), best)
            if spec.predicts:
                best = torch.where(largest > top, where + spec.start + low, best)
            raised = torch.maximum(top, largest)
            total = total * (top - raised).exp() + logits.sub_(raised[:, None]).exp_().sum(-1)
            top = raised
        if spec.ranks is not None:
            top, total, target, best = _over_ranks(spec, top, total, target, best)
        spread = top + total.log()
        counted = labels != IGNORE
        ctx.spec = spec
        ctx.save_for_backward(rows, weight, bias, labels, spread)
        losses = ((spread - target) * counted).to(wide)
        predicted = best.to(losses.dtype) if spec.predicts else torch.zeros_like(losses)
        ctx.mark_non_differentiable(predicted)
        return losses, predicted

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        rows, weight, bias, labels, spread = ctx.saved_tensors
        work = _Backward(ctx.spec, rows, weight, bias, labels, spread, gradient * (labels != IGNORE))
        wants_weight = ctx.needs_input_grad[1]
        chunk = max(1, SUM_ELEMENTS // rows.shape[1])
        found = work.at_once(wants_weight) if len(rows) <= chunk else work.in_two_passes(chunk, wants_weight)
        return *found, None, None


def _over_ranks(
    spec: _Spec, top: torch.Tensor, total: torch.Tensor, target: torch.Tensor, best: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Figures of the own slice of the vocabulary → of all of it."""
    assert spec.ranks is not None
    highest = spec.ranks.largest(top)
    if spec.predicts:  # of equals the first, as in `argmax`
        best = -spec.ranks.largest(-best.masked_fill(top < highest, torch.iinfo(best.dtype).max))
    total, target = spec.ranks.sum(torch.stack([total * (top - highest).exp(), target]))
    return highest, total, target, best


@dataclass(frozen=True)
class _Backward:
    """Gradients of hidden states, weight and bias; logits are computed a second time, block by block."""

    spec: _Spec
    rows: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    labels: torch.Tensor
    spread: torch.Tensor
    """Logarithm of the sum of exponentials."""
    gradient: torch.Tensor
    """Of every token's loss; 0 where the label is not counted."""

    def of_logits(self, tokens: slice, low: int, high: int) -> torch.Tensor:
        """Gradient of a block of the head's output, in its precision."""
        bias = None if self.bias is None else self.bias[low:high]
        logits = self.spec.logits(self.rows[tokens], self.weight[low:high], bias)
        slope = self.spec.transform.derivative(logits)
        found = (
            logits.sub_(self.spread[tokens, None]) if isinstance(slope, float) else logits - self.spread[tokens, None]
        )
        inside, places = self.spec.own(self.labels[tokens], low, high)
        kept = 1.0 - self.spec.smoothing
        found = found.exp_().scatter_add_(1, places, -kept * inside.to(found.dtype)[:, None])
        if self.spec.smoothing:
            found -= self.spec.smoothing / self.spec.vocabulary
        return found.mul_(self.gradient[tokens, None]).mul_(slope).to(self.rows.dtype)

    def at_once(self, wants_weight: bool) -> tuple[torch.Tensor | None, ...]:
        """One pass over the vocabulary. Sums of the hidden states' gradient are fp32; the weight's needs no sums."""
        hidden = torch.zeros_like(self.rows, dtype=self.spread.dtype)
        weight, bias = self._empty(wants_weight)
        for low, high in _columns(self.weight, len(self.rows)):
            block = self.of_logits(slice(None), low, high)
            hidden += block @ self.weight[low:high]
            if weight is not None:
                torch.mm(block.T, self.rows, out=weight[low:high])
            if bias is not None:
                bias[low:high] = block.sum(0)
        return hidden.to(self.rows.dtype), weight, bias

    def in_two_passes(self, chunk: int, wants_weight: bool) -> tuple[torch.Tensor | None, ...]:
        """Long sequences: fp32 sums of all tokens, or of the whole weight, would take as much as the logits do."""
        hidden = torch.empty_like(self.rows)
        weight, bias = self._empty(wants_weight)
        parts = [slice(low, high) for low, high in _blocks(len(self.rows), chunk)]
        for tokens in parts:
            total = torch.zeros_like(self.rows[tokens], dtype=self.spread.dtype)
            for low, high in _columns(self.weight, chunk):
                total += self.of_logits(tokens, low, high) @ self.weight[low:high]
            hidden[tokens] = total
        for low, high in _columns(self.weight, chunk) if weight is not None or bias is not None else ():
            sums = torch.zeros_like(self.weight[low:high], dtype=self.spread.dtype)
            column = sums.new_zeros(high - low)
            for tokens in parts:
                block = self.of_logits(tokens, low, high)
                sums += block.T @ self.rows[tokens]
                column += block.sum(0)
            if weight is not None:
                weight[low:high] = sums
            if bias is not None:
                bias[low:high] = column
        return hidden, weight, bias

    def _empty(self, wants_weight: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        weight = torch.empty_like(self.weight) if wants_weight else None
        return weight, None if self.bias is None or not wants_weight else torch.empty_like(self.bias)


def install(model: Any, loss: HeadLoss, enter: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden) -> None:
    """Let a model's head compute the loss; what the model would do to its logits afterwards is taken out.

    `enter` brings hidden states into the region of the head's shards.
    """
    head = model.get_output_embeddings()
    head.forward = lambda hidden: loss.of_hidden(enter(hidden), head.weight, head.bias)
    # A copy: the config may be saved with an export, and other modules read it.
    model.config = copy.copy(model.config)
    for key, neutral in (("final_logit_softcapping", None), ("logits_scaling", 1.0), ("logit_scale", 1.0)):
        if getattr(model.config, key, None) is not None:
            setattr(model.config, key, neutral)
        if isinstance(getattr(model, key, None), int | float):  # Cohere's models keep a copy of their own
            setattr(model, key, neutral)


def why_not(section: Model) -> str:
    """Why a model's loss needs complete logits; empty if it does not. Tried on a tiny model."""
    if section.task not in (None, "causal-lm"):
        return f"{section.task} has another loss"
    try:
        config = trial_config(load_config(section))
    except Exception as error:  # configs that differ by layer refuse to be read as one
        return f"no tiny model can be made of it: {first_line(error)}"
    attention = without_gpu(section.attention)
    tiny = Model(config=config, init="scratch", precision="fp32", attention=attention)
    return tried("head", config, [attention], lambda: _trial(tiny))


def _trial(tiny: Model) -> str:
    plain, fused = (build_model(tiny, 0).eval() for _ in range(2))
    if reason := unfit_head(plain):
        return reason
    loss = HeadLoss(Transform.of(plain.config))
    install(fused, loss)
    return _difference(plain, fused, loss)


def unfit_head(model: Any) -> str:
    """Why a model's own head can't compute the loss; empty if it can."""
    head = model.get_output_embeddings()
    return "" if type(head) is torch.nn.Linear else f"its head is a {type(head).__name__}"


def _difference(plain: Any, fused: Any, loss: HeadLoss) -> str:
    vocabulary = plain.get_output_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (2, 8), generator=generator)
    labels = ids.roll(-1, 1)
    labels[0, :3] = IGNORE
    logits = plain(input_ids=ids, use_cache=False).logits.flatten(0, 1).float()
    expected = cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")
    loss.expect(MicroBatch(ids, labels))
    found = fused(input_ids=ids, use_cache=False).logits[..., 0].sum()
    torch.autograd.backward([expected, found])
    pairs = [
        (expected.detach(), found.detach()),
        *((p.grad, q.grad) for p, q in zip(plain.parameters(), fused.parameters(), strict=True)),
    ]
    worst = max(
        (float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) for a, b in pairs if a is not None), default=1.0
    )
    return "" if worst < 1e-4 else f"its loss differs by {worst:.1e} if the head computes it"
