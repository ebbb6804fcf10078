"""Other weights than the last ones: a moving average of them, and a copy of the first.

The average is a state of the optimizer beside each of its tensors, so that it is sharded as they are, is in checkpoints
of every strategy, and costs no communication. The copy is what a live reference computes with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from toolkit.recipe.optimizer_sections import Ema
from toolkit.recipe.sections import Train
from toolkit.runtime.checkpoint.fragments import AVERAGE, Stateful
from toolkit.runtime.engine.training_state import DeepSpeedState

CHUNK = 2**24
"""Elements that are exchanged at a time, through a copy of them: 64 MiB."""


def install(engine: Any, optimizer: torch.optim.Optimizer, section: Ema) -> None:
    """Average the weights after every update of the optimizer from now on."""

    @torch.no_grad()
    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        steps = engine.lr_scheduler.last_epoch  # before this update; it is restored with a checkpoint
        decay = min(section.decay, (1 + steps) / (10 + steps))
        for group in optimizer.param_groups:
            for weight in group["params"]:
                state = optimizer.state[weight]
                if AVERAGE not in state:
                    state[AVERAGE] = weight.detach().clone()
                else:
                    state[AVERAGE].lerp_(weight, 1 - decay)

    optimizer.register_step_post_hook(after)


def evaluated_weights(train: Train, state: Stateful) -> Callable[[], AbstractContextManager[None]]:
    """A context with the weights that evaluations use: their average if the recipe or the optimizer asks for it."""
    asked = train.ema is not None and train.ema.evaluate
    if not asked and train.optimizer != "schedule_free":
        return nullcontext
    assert isinstance(state, DeepSpeedState), "islands keep no average"
    return functools.partial(averaged, state)


@contextmanager
def averaged(state: DeepSpeedState) -> Iterator[None]:
    """Compute with the average inside this context, if there is one. Collective."""
    held = [(master, found[AVERAGE]) for master, found in state.base.state.items() if AVERAGE in found]
    _exchange(held)
    state.refresh()
    try:
        yield
    finally:
        _exchange(held)
        state.refresh()


@torch.no_grad()
def _exchange(held: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for master, average in held:
        first, second = master.data.view(-1), average.view(-1)
        for low in range(0, first.numel(), CHUNK):
            here = slice(low, low + CHUNK)
            kept = first[here].clone()
            first[here] = second[here]
            second[here] = kept


class FirstWeights:
    """This rank's part of the trained weights, as it was when this was made: sharded as the weights are.

    What is not trained is not copied, so under LoRA the copy is that of the adapters.
    """

    def __init__(self, state: DeepSpeedState) -> None:
        self._state = state
        held = [_shard_of(parameter) for parameter in state.names if parameter.requires_grad]
        held += [buffer for buffer in state.buffers() if buffer.is_floating_point()]  # router biases, for example
        self._held = [(tensor, tensor.detach().clone()) for tensor in held]

    @property
    def copies(self) -> list[torch.Tensor]:
        """The first weights; inside `in_use`, the last ones."""
        return [copy for _, copy in self._held]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute with the first weights inside this context; nothing is copied. Collective under ZeRO 3."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        with self._state.weights_replaced():
            swapped = [tensor.data for tensor, _ in self._held]
            for tensor, other in self._held:
                tensor.data = other
            self._held = [(tensor, last) for (tensor, _), last in zip(self._held, swapped, strict=True)]


def _shard_of(parameter: torch.Tensor) -> torch.Tensor:
    """What a rank holds of a parameter: under ZeRO 3 a shard, from which DeepSpeed gathers the parameter."""
    shard: torch.Tensor = getattr(parameter, "ds_tensor", parameter)
    return shard
