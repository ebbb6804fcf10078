"""One stage of a pipeline: the model's own forward pass, with stand-ins for the layers of other stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.runtime.distributed.process_group import device
from toolkit.runtime.engine.nonfinite import NonFiniteCounter
from toolkit.runtime.mixtures.balancer import NoRouters, RouterWatch, SeveralStages
from toolkit.runtime.models.attention import forward
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
    pass_by,
)
from toolkit.runtime.pipeline.split import StageSplit, hollow, places


class Stage(torch.nn.Module):
    """Maps the values from the previous stage to those for the next one; the last stage returns the loss.

    Every stage holds the micro-batches of its replica and uses one per forward pass. So masks, positions and rotary
    tables are computed on each stage, and only hidden states are sent.
    """

    def __init__(
        self, model: PreTrainedModel, split: StageSplit, index: int, dtype: torch.dtype, loss: Loss | None = None
    ) -> None:
        super().__init__()
        self.loss = loss or summed_loss
        self.model = model
        self.split = split
        self.index = index
        self.parameters_by_name = _carve(self, model, split, index, dtype)
        """This stage's parameters under their names in the full model."""
        self._queue: list[MicroBatch] = []
        self._weight = 1.0
        self.nonfinite = NonFiniteCounter(device())
        if index == 0:
            model.get_input_embeddings().register_forward_hook(self.nonfinite.after_embedding)
        self.routers: RouterWatch = NoRouters()
        """Balances and counts the routers of this stage."""
        self._received: tuple[torch.Tensor, ...] = ()
        self.prepared: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss
        """Prepares a loss for the engine's backward pass (loss scaling)."""
        self.correct = torch.zeros((), dtype=torch.long, device=device())
        """Number of correct predictions in the last evaluation; 0 on all but the last stage."""

    def feed(self, batch: Sequence[MicroBatch], weight: float) -> None:
        """Set the micro-batches of the next step, and the factor of their summed loss."""
        self._queue, self._weight = list(batch), weight
        self.nonfinite.reset()
        self.correct.zero_()

    def received(self) -> tuple[torch.Tensor, ...]:
        """Values from the previous stage for the current micro-batch."""
        return self._received

    def forward(self, received: Any) -> Any:
        """Run one micro-batch."""
        micro = self._queue.pop(0).located().to(device())
        if self.index > 0:
            self._received = anchored(received if isinstance(received, tuple) else (received,))
        inputs = self._received
        self.routers.expect(micro)
        self.loss.expect(micro)
        try:
            output = forward(self.model, micro)
        except Cut as cut:
            outputs = _with_gradients(chosen(cut.arguments, self.split.crossing[self.split.bounds[self.index + 1]]))
            self.nonfinite.forward(inputs, outputs)
            return outputs[0] if len(outputs) == 1 else outputs
        finally:
            self._received = ()
        if not self.training:
            self.correct += self.loss.num_correct(output.logits, micro.labels)
        loss = self.loss(output.logits, micro.labels) * self._weight
        self.nonfinite.forward(inputs, (loss,))
        return self.prepared(loss)


class Chunks(torch.nn.Module):
    """The stages of one rank. A parameter that several of them use exists once."""

    def __init__(self, stages: Sequence[Stage], rank_of: Callable[[int], int] = lambda stage: stage) -> None:
        """`rank_of`: the pipeline rank of a stage."""
        super().__init__()
        self.stages = torch.nn.ModuleList(stages)
        self.split = stages[0].split
        self.rank_of = rank_of
        self.running = 0
        """The chunk whose forward pass the engine runs."""
        self.shapes: list[Any] = []
        """Shapes of the micro-batches that were fed last."""
        self.parameters_by_name = _united(stages)
        """This rank's parameters under their names in the full model."""

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)  # type: ignore[arg-type]

    @property
    def routers(self) -> RouterWatch:
        """Balances and counts the routers of all stages."""
        return self.last.routers if len(self.stages) == 1 else SeveralStages([stage.routers for stage in self])

    @property
    def last(self) -> Stage:
        """The stage nearest to the end of the model."""
        stage: Any = self.stages[-1]
        return stage  # type: ignore[no-any-return]

    def feed(self, batch: Sequence[MicroBatch], weight: float) -> None:
        """Set the micro-batches of the next step, and the factor of their summed loss."""
        located = [micro.located() for micro in batch] if len(self.stages) > 1 else batch
        self.shapes = [micro.shape for micro in batch]
        for stage in self:
            stage.feed(located, weight)

    def forward(self, received: Any) -> Any:
        """Run one micro-batch through the running chunk."""
        return self.stages[self.running](received)

    def owners(self, name: str) -> tuple[int, ...]:
        """Pipeline ranks that hold a parameter."""
        return tuple(sorted({self.rank_of(stage) for stage in self.split.owners[name]}))

    @property
    def shared(self) -> list[tuple[str, tuple[int, ...]]]:
        """Trained parameters that several ranks hold, with those ranks, in the same order on all ranks."""
        found = [(name, self.owners(name)) for name, _ in self.split.shared]
        return [(name, ranks) for name, ranks in found if len(ranks) > 1]


def _united(stages: Sequence[Stage]) -> dict[str, torch.nn.Parameter]:
    """Parameters of all stages by name; where a later stage has one of its own, it gets that of the first."""
    named: dict[str, torch.nn.Parameter] = {}
    for stage in stages:
        where = sites(stage.model)
        for name, parameter in list(stage.parameters_by_name.items()):
            first = named.setdefault(name, parameter)
            if first is not parameter:
                for module, key in where[id(parameter)]:
                    module._parameters[key] = first
                stage.parameters_by_name[name] = first
    return named


def _carve(
    stage: Stage, model: PreTrainedModel, split: StageSplit, index: int, dtype: torch.dtype
) -> dict[str, torch.nn.Parameter]:
    """Reduce a skeleton to a stage's part; return the stage's parameters by name."""
    named = dict(model.named_parameters())
    start, end = split.bounds[index], split.bounds[index + 1]
    lists: Any = [model.get_submodule(name) for name in split.layers]
    layers = places(lists)
    first = layers[start].layer
    for number, place in enumerate(layers):
        if not start <= number < end:
            earlier = pass_by(split.templates[place.which], place.number == 0)
            place.put(StandIn(place.layer, _leave if number == end else earlier))
    if index > 0:
        enter_at(first, split.crossing[start], stage.received)
    own = {name: parameter for name, parameter in named.items() if index in split.owners[name]}
    where = sites(model)  # without those behind stand-ins: nothing reads them
    for name, parameter in named.items():
        if name not in own and id(parameter) in where:
            _make_unowned(where, parameter, dtype)
    return own


def _with_gradients(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The outputs of a stage; one that frozen weights alone have made becomes a leaf, for which a gradient arrives."""
    if not torch.is_grad_enabled():
        return outputs
    return tuple(o.detach().requires_grad_() if o.is_floating_point() and not o.requires_grad else o for o in outputs)


def _leave(arguments: Arguments) -> Any:
    raise Cut(arguments)


def _make_unowned(where: Sites, parameter: torch.nn.Parameter, dtype: torch.dtype) -> None:
    """Replace a parameter by a plain hollow tensor: code that reads it still runs, but nothing is stored or trained."""
    for module, key in where[id(parameter)]:
        del module._parameters[key]
        module.__dict__[key] = hollow(parameter, dtype, device())
