"""One stage of a pipeline: the model's own forward, with its own layers real and the others stood in for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.runtime.distributed.process_group import device
from toolkit.runtime.engine.nonfinite import NonFiniteCounter
from toolkit.runtime.models.loss import Loss, summed_loss
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.models.parameter_shards import Sites, sites
from toolkit.runtime.pipeline.boundaries import (
    Arguments,
    Cut,
    StandIn,
    anchored,
    chosen,
    enter_at,
    fill_template,
    hidden_of,
)
from toolkit.runtime.pipeline.split import StageSplit, hollow


class Stage(torch.nn.Module):
    """Takes what the stage before sends, returns what the next one needs; the last returns the loss.

    Every stage holds the micro-batches of its replica and takes one a forward, so masks, positions and rotary tables
    are made where they are used and only hidden states travel.
    """

    def __init__(
        self, model: PreTrainedModel, split: StageSplit, index: int, dtype: torch.dtype, loss: Loss | None = None
    ) -> None:
        super().__init__()
        self._loss = loss or summed_loss
        self.model = model
        self.split = split
        self.index = index
        self.parameters_by_name = _carve(self, model, split, index, dtype)
        """Own parameters under their names in the whole model."""
        self._queue: list[MicroBatch] = []
        self._weight = 1.0
        self.faults = NonFiniteCounter(device())
        if index == 0:
            model.get_input_embeddings().register_forward_hook(self.faults.after_embedding)
        self._received: tuple[torch.Tensor, ...] = ()
        self.prepared: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss
        """Makes a loss ready for the engine's backward pass."""
        self.correct = torch.zeros((), dtype=torch.long, device=device())
        """Labels that the last stage found while it evaluated what was fed last."""

    def feed(self, batch: Sequence[MicroBatch], weight: float) -> None:
        """The micro-batches of the coming step, and what their summed loss is multiplied by."""
        assert len({micro.shape for micro in batch}) == 1, "micro-batches of one step have one shape"
        self._queue, self._weight = list(batch), weight
        self.faults.reset()
        self.correct.zero_()

    def received(self) -> tuple[torch.Tensor, ...]:
        """What the stage before sent for the current micro-batch."""
        return self._received

    def forward(self, arrived: Any) -> Any:
        """One micro-batch."""
        micro = self._queue.pop(0).to(device())
        if self.index > 0:
            self._received = anchored(arrived if isinstance(arrived, tuple) else (arrived,))
        taken = self._received
        try:
            output = self.model(**micro.inputs())
        except Cut as cut:
            leaving = chosen(cut.arguments, self.split.crossing[self.split.bounds[self.index + 1]])
            self.faults.forward(taken, leaving)
            return leaving[0] if len(leaving) == 1 else leaving
        finally:
            self._received = ()
        if not self.training:
            self.correct += self._loss.num_correct(output.logits, micro.labels)
        loss = self._loss(output.logits, micro.labels) * self._weight
        self.faults.forward(taken, (loss,))
        return self.prepared(loss)


def _carve(
    stage: Stage, model: PreTrainedModel, split: StageSplit, index: int, dtype: torch.dtype
) -> dict[str, torch.nn.Parameter]:
    """Leave only a stage's part in a skeleton."""
    named = dict(model.named_parameters())
    where = sites(model)
    start, end = split.bounds[index], split.bounds[index + 1]
    layers = model.get_submodule(split.layers)
    assert isinstance(layers, torch.nn.ModuleList)
    first = layers[start]
    for number, layer in enumerate(list(layers)):
        if not start <= number < end:
            layers[number] = StandIn(layer, _leave if number == end else _pass_by(split.template))
    if index > 0:
        enter_at(first, split.crossing[start], stage.received)
    own = {name: parameter for name, parameter in named.items() if index in split.owners[name]}
    for name, parameter in named.items():
        if name not in own:
            _make_unowned(where, parameter, dtype)
    return own


def _leave(arguments: Arguments) -> Any:
    raise Cut(arguments)


def _pass_by(template: Any) -> Any:
    """What stands for a layer of an earlier stage: empty values of the right shapes."""
    return lambda arguments: fill_template(template, torch.zeros_like(hidden_of(arguments), requires_grad=False))


def _make_unowned(where: Sites, parameter: torch.nn.Parameter, dtype: torch.dtype) -> None:
    """A plain hollow tensor instead of a parameter: code that reads it runs, and nothing is stored or trained."""
    for module, key in where[id(parameter)]:
        del module._parameters[key]
        module.__dict__[key] = hollow(parameter, dtype, device())
