"""1-bit Adam (Tang et al. 2021) over any backend: after a warm-up, ranks exchange the signs of their momentum.

After the warm-up gradients are no longer reduced. What compression loses is kept and added to the next message (error
feedback), on the way to the rank that averages and on the way back. DeepSpeed had a 1-bit Adam for NCCL and MPI until
0.19.6; it was removed in 0.19.7.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import deepspeed.comm as dist
import torch
from torch.nn.functional import pad

from toolkit.plans.plan import BLOCK
from toolkit.recipe.sections import Train


class OneBitAdam(torch.optim.Optimizer):
    """Adam for `freeze_steps` steps; then the second moment is frozen and the first is averaged by its signs.

    `step` does nothing before `begin`: DeepSpeed 0.19.8 takes a step with zero gradients when it creates some of its
    optimizers (see `deepspeed_fixups.undo_first_step`).
    """

    def __init__(self, parameters: Iterable[torch.Tensor], train: Train, lr: float) -> None:
        assert train.freeze_steps is not None, "checked with the recipe"
        self._train, self._freeze = train, train.freeze_steps
        self._exchange: OneBitExchange | None = None
        self._begun = False
        super().__init__(parameters, {"lr": lr})

    def begin(self, exchange: OneBitExchange | None) -> None:
        """Take steps from now on; `exchange` is None if there is only one rank."""
        self._begun, self._exchange = True, exchange

    @property
    def compresses(self) -> bool:
        """Whether the warm-up is over before the next step."""
        return max((int(state.get("step", 0)) for state in self.state.values()), default=0) >= self._freeze

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update. Collective after the warm-up."""
        if not self._begun:
            return
        compresses = self.compresses
        for group in self.param_groups:
            weights = group["params"]  # parameters without a gradient too: other ranks may have one
            for weight in weights:
                self._moments(weight, frozen=compresses)
            if compresses and self._exchange is not None:
                self._exchange.mean([self.state[weight]["exp_avg"] for weight in weights])
            for weight in weights:
                weight.sub_(self._change(weight), alpha=float(group["lr"]))

    def _moments(self, weight: torch.Tensor, *, frozen: bool) -> None:
        (first, second), state = self._train.betas, self.state[weight]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        state["step"] = int(state.get("step", 0)) + 1
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        state["exp_avg"].mul_(first).add_(grad, alpha=1 - first)
        if not frozen:
            state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)

    def _change(self, weight: torch.Tensor) -> torch.Tensor:
        (first, second), state = self._train.betas, self.state[weight]
        counted = min(state["step"], self._freeze)
        root = state["exp_avg_sq"].div(1 - second**counted).sqrt_().add_(self._train.eps)
        change: torch.Tensor = state["exp_avg"].div(1 - first ** state["step"]).div_(root)
        return change.add_(weight, alpha=self._train.weight_decay)


class OneBitExchange:
    """A mean over ranks for which only signs and scales are sent."""

    def __init__(self, ranks: int, rank: int, group: Any = None) -> None:
        self._ranks, self._rank, self._group = ranks, rank, group
        self._own_error: torch.Tensor | None = None
        self._part_error: torch.Tensor | None = None

    def mean(self, tensors: list[torch.Tensor]) -> None:
        """Replace tensors by approximately their mean, equal on every rank. Collective."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        size = flat.numel()
        flat = pad(flat, (0, -size % (self._ranks * BLOCK)))
        if self._own_error is None or self._part_error is None:
            self._own_error = torch.zeros_like(flat)
            self._part_error = torch.zeros_like(flat[: flat.numel() // self._ranks])
        sent, self._own_error = compressed(flat + self._own_error)
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=self._group)
        part = expanded(arrived).view(self._ranks, -1).mean(0)
        answer, self._part_error = compressed(part + self._part_error)
        answers = answer.new_empty(self._ranks * answer.shape[0], answer.shape[1])
        dist.all_gather_into_tensor(answers, answer, group=self._group)
        found, begin = expanded(answers), 0
        for tensor in tensors:
            tensor.copy_(found[begin : begin + tensor.numel()].view_as(tensor))
            begin += tensor.numel()


def compressed(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(one row of bytes per block: signs, then the scale; what the rows lose)."""
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().mean(1, keepdim=True)
    positive = blocks >= 0
    bits = (positive.view(-1, BLOCK // 8, 8).to(torch.uint8) * _places(values)).sum(-1, dtype=torch.uint8)
    kept = torch.where(positive, scales, -scales)
    return torch.cat([bits, scales.view(torch.uint8)], 1), (blocks - kept).flatten()


def expanded(rows: torch.Tensor) -> torch.Tensor:
    """Decode the rows of `compressed`."""
    bits, scales = rows[:, : BLOCK // 8], rows[:, BLOCK // 8 :].contiguous().view(torch.float32)
    positive = (bits.unsqueeze(-1) & _places(rows)) != 0
    return torch.where(positive.flatten(1), scales, -scales).flatten()


def _places(like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=like.device)
