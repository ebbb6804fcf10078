"""How a model splits into stages, found by one small forward pass, without code per architecture.

Every layer is replaced by a stand-in that returns fresh leaves of the autograd graph. The leaves that the graph reaches
from a layer's arguments show which arguments carry values across a boundary, and which parameters outside the layers
each stage needs. Weights are hollow (one element of storage each), so this needs no memory. Every rank finds the same
split. An encoder-decoder is one sequence of layers, the encoder's first; its output is an argument of every decoder
layer, so it crosses each later boundary.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedModel

from toolkit.runtime.models.build import SplitRefused, find_layers
from toolkit.runtime.models.parameter_shards import sites
from toolkit.runtime.models.tiny_models import probe_inputs
from toolkit.runtime.pipeline.boundaries import (
    Arguments,
    Cut,
    Side,
    StandIn,
    fill_template,
    hidden_of,
    pass_by,
    template_of,
)

PROBES = ((1, 8), (2, 16))
"""Rows and tokens of the smallest forward passes; sizes that differ between them follow rows or tokens."""


@dataclass(frozen=True, kw_only=True)
class StageSplit:
    """What every stage owns and what crosses its boundaries; equal on every rank."""

    layers: tuple[str, ...]
    """Names of the lists of layers, in the order of the forward pass: one, or an encoder's and a decoder's."""
    bounds: tuple[int, ...]
    """First layer of each stage, then the number of layers."""
    templates: tuple[Any, ...]
    """Structure of a layer's output, for each list."""
    crossing: Mapping[int, tuple[int, ...]]
    """First layer of a stage → positions, in its flattened arguments, of values from the previous stage."""
    owners: Mapping[str, frozenset[int]]
    """Parameter → stages that hold it; if there are several, gradients are summed."""
    trained: frozenset[str]
    """Parameters that have gradients."""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    @property
    def shared(self) -> list[tuple[str, tuple[int, ...]]]:
        """Trained parameters that several stages hold, in the same order on all ranks."""
        several = [(name, tuple(sorted(stages))) for name, stages in self.owners.items() if len(stages) > 1]
        return sorted((name, stages) for name, stages in several if name in self.trained)


@dataclass(frozen=True)
class Place:
    """Where a layer is."""

    layers: torch.nn.ModuleList
    number: int
    """Its number in the list."""
    which: int
    """The number of the list."""

    @property
    def layer(self) -> torch.nn.Module:
        """The layer."""
        return self.layers[self.number]

    def put(self, layer: torch.nn.Module) -> None:
        """Replace the layer."""
        self.layers[self.number] = layer


def places(lists: Sequence[torch.nn.ModuleList]) -> list[Place]:
    """All layers of the lists, one list after the other."""
    return [Place(layers, number, which) for which, layers in enumerate(lists) for number in range(len(layers))]


def layer_lists(model: PreTrainedModel) -> dict[str, torch.nn.ModuleList]:
    """Lists of layers by name, in the order of the forward pass: an encoder-decoder that generates text has two."""
    if not (model.config.is_encoder_decoder and model.can_generate()):
        return dict([find_layers(model)])
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for part in (model.get_encoder(), model.get_decoder()):
        lists = [module for module in part.modules() if isinstance(module, torch.nn.ModuleList)]
        if not lists:
            raise SplitRefused("no list of layers was found in the encoder or the decoder")
        layers = max(lists, key=lambda each: sum(p.numel() for p in each.parameters()))
        found[names[id(layers)]] = layers
    return found


def count_layers(model: PreTrainedModel) -> int:
    """Layers that stages can have; those of an encoder count as well."""
    return sum(map(len, layer_lists(model).values()))


def hollow(parameter: torch.nn.Parameter, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Zeros of a parameter's shape in one element of storage."""
    kind = dtype if parameter.is_floating_point() else parameter.dtype
    return torch.zeros((), dtype=kind, device=device).expand(parameter.shape)


def analyse(model: PreTrainedModel, bounds: tuple[int, ...]) -> StageSplit:
    """How a skeleton splits at these bounds. Consumes the skeleton. `SplitRefused` if a boundary is not clean."""
    names = {id(p): name for name, p in model.named_parameters()}
    trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
    lists = layer_lists(model)
    layers = places(list(lists.values()))
    if bounds[-1] != len(layers):
        raise SplitRefused(f"bounds end at {bounds[-1]}; the model has {len(layers)} layers")
    probe = _Probe(bounds, _owners_of_layers(model, layers, names, bounds))
    leaves = _make_hollow(model, names)
    probe.outside = {id(leaf): name for leaf, name in leaves.items() if not probe.owners[name]}
    model.train()
    with torch.random.fork_rng(devices=[]):
        probe.templates = _layer_outputs(model, layers)
        _run_probe(model, layers, probe)
    probe.place_the_rest(trained)
    return StageSplit(
        layers=tuple(lists),
        bounds=bounds,
        templates=tuple(probe.templates),
        crossing=probe.crossing,
        owners={name: frozenset(stages) for name, stages in probe.owners.items()},
        trained=trained,
    )


@dataclass
class _Probe:
    """Collects findings while the stand-ins are called."""

    bounds: tuple[int, ...]
    owners: dict[str, set[int]]
    templates: list[Any] = field(default_factory=list)
    outside: dict[int, str] = field(default_factory=dict)
    """Leaf → its parameter, for parameters outside the layers."""
    crossing: dict[int, tuple[int, ...]] = field(default_factory=dict)
    calls: list[int] = field(default_factory=list)
    depth: dict[int, int] = field(default_factory=dict)
    """Leaf that a stand-in returned → the next layer."""
    alive: list[torch.Tensor] = field(default_factory=list)
    """Leaves and side tensors, kept alive so that their ids stay unique."""
    sides: set[int] = field(default_factory=set)

    def stage_of(self, layer: int) -> int:
        """The stage that runs a layer."""
        return next(s for s in range(len(self.bounds) - 1) if self.bounds[s] <= layer < self.bounds[s + 1])

    def call(self, layer: int, which: int, arguments: Arguments) -> Any:
        """Forward pass of a stand-in for a layer of a list: record the arguments, return fresh leaves."""
        self.calls.append(layer)
        hidden = hidden_of(arguments)
        self.crossing[layer] = self._carried(layer, arguments)
        fresh = hidden.detach().clone().requires_grad_()
        self._remember(fresh, layer + 1)
        return fill_template(self.templates[which], fresh, self._remember_side)

    def finish(self, logits: torch.Tensor) -> None:
        """Give the last stage the parameters that the logits depend on."""
        layers = self.bounds[-1]
        reached, carried = self._reach(logits, layers)
        if not carried:
            raise SplitRefused("the logits do not depend on the layers")
        self._own(reached, len(self.bounds) - 2)

    def place_the_rest(self, trained: frozenset[str]) -> None:
        """Tables read without gradients go to every stage; unused weights stay on the first stage."""
        for name, stages in self.owners.items():
            if not stages:
                stages.update({0} if name in trained else range(len(self.bounds) - 1))

    def _carried(self, layer: int, arguments: Arguments) -> tuple[int, ...]:
        """Positions of arguments that hold values of earlier layers; also records which stage needs which parameter."""
        positions, cut = [], []
        for position, leaf in enumerate(tree_flatten(arguments)[0]):
            if not torch.is_tensor(leaf):
                continue
            if id(leaf) in self.sides:
                positions.append(position)
            elif leaf.requires_grad:
                reached, carried = self._reach(leaf, layer)
                self._own(reached, self.stage_of(max(layer - 1, 0)) if carried else self.stage_of(layer))
                if carried:
                    positions.append(position)
                    cut.append(leaf)
        for leaf in cut:
            self._start_anew(leaf, layer)
        return tuple(positions)

    def _start_anew(self, leaf: torch.Tensor, layer: int) -> None:
        """Detach an argument in place: a value that bypasses the layer then shows as older than the layer.

        A tensor that every layer gets (an encoder's output) is detached already, and passes through this layer, too.
        """
        if leaf.grad_fn is not None and not leaf._is_view():
            leaf.detach_().requires_grad_()
        if leaf.grad_fn is None:
            self._remember(leaf, layer)

    def _reach(self, tensor: torch.Tensor, layer: int) -> tuple[set[int], bool]:
        """(leaves that a tensor depends on, whether any comes from a layer)."""
        reached = _leaves(tensor)
        depths = [self.depth[leaf] for leaf in reached if leaf in self.depth]
        for border in self.bounds[1:-1]:
            if border < layer and any(depth < border for depth in depths):
                raise SplitRefused(
                    f"values of layers before layer {border} are used after it without passing through it: "
                    "no clean boundary there; move it with strategy.pipeline_bounds, or use another strategy"
                )
        return reached, bool(depths)

    def _own(self, reached: set[int], stage: int) -> None:
        for leaf in reached:
            if leaf in self.outside:
                self.owners[self.outside[leaf]].add(stage)

    def _remember(self, leaf: torch.Tensor, depth: int) -> None:
        self.depth[id(leaf)] = depth
        self.alive.append(leaf)

    def _remember_side(self, side: torch.Tensor) -> None:
        self.sides.add(id(side))
        self.alive.append(side)


def _owners_of_layers(
    model: torch.nn.Module, layers: Sequence[Place], names: Mapping[int, str], bounds: tuple[int, ...]
) -> dict[str, set[int]]:
    owners: dict[str, set[int]] = {name: set() for name, _ in model.named_parameters()}
    for stage, (start, end) in enumerate(itertools.pairwise(bounds)):
        for place in layers[start:end]:
            for parameter in place.layer.parameters():
                owners[names[id(parameter)]].add(stage)
    return owners


def _make_hollow(model: torch.nn.Module, names: Mapping[int, str]) -> dict[torch.nn.Parameter, str]:
    leaves = {}
    where = sites(model)
    for old in list(model.parameters()):
        leaf = torch.nn.Parameter(hollow(old, old.dtype), requires_grad=old.is_floating_point())
        for module, key in where[id(old)]:
            module._parameters[key] = leaf
        leaves[leaf] = names[id(old)]
    return leaves


def _layer_outputs(model: PreTrainedModel, layers: Sequence[Place]) -> list[Any]:
    """The structure of the output of each list's first layer; stand-ins take the place of the lists before it."""
    found: list[Any] = []
    whole = [place.layer for place in layers]
    try:
        for first in (place for place in layers if place.number == 0):
            found.append(_first_output(model, first))
            for place in layers:
                if place.which == first.which:
                    place.put(StandIn(place.layer, pass_by(found[-1], place.number == 0)))
    finally:
        for place, layer in zip(layers, whole, strict=True):
            place.put(layer)
    return found


def _first_output(model: PreTrainedModel, first: Place) -> Any:
    """The structure of a layer's output. Only tensors beside the hidden states need a second size, and gradients."""
    arguments = _arguments(model, first, PROBES[0])
    template = template_of([_output(first.layer, arguments)], [hidden_of(arguments)])
    if not any(isinstance(leaf, Side) for leaf in tree_flatten(template)[0]):
        return template
    calls = [arguments, _arguments(model, first, PROBES[1])]
    return template_of([_output(first.layer, call, graph=True) for call in calls], [hidden_of(call) for call in calls])


def _arguments(model: PreTrainedModel, first: Place, size: tuple[int, int]) -> Arguments:
    """The arguments that a layer gets in the smallest forward pass of a size."""

    def stop(arguments: Arguments) -> None:
        raise Cut(arguments)

    layer = first.layer
    first.put(StandIn(layer, stop))
    try:
        model(**probe_inputs(model, *size))
    except Cut as cut:
        return cut.arguments
    finally:
        first.put(layer)
    raise SplitRefused("the model's forward does not call its first layer")


def _output(layer: torch.nn.Module, arguments: Arguments, *, graph: bool = False) -> Any:
    """The output of a layer whose weights are zeros.

    torch 2.13's grouped matrix product of experts refuses expanded (hollow) weights, so this one layer gets real zeros
    for the call. They can go when `torch._grouped_mm` accepts a stride of 0.
    """
    args, kwargs = arguments
    zeros = {
        name: torch.zeros_like(p, memory_format=torch.contiguous_format).requires_grad_(graph and p.is_floating_point())
        for name, p in layer.named_parameters()
    }
    with torch.set_grad_enabled(graph):
        return torch.func.functional_call(layer, zeros, args, dict(kwargs))


def _run_probe(model: PreTrainedModel, layers: Sequence[Place], probe: _Probe) -> None:
    for index, place in enumerate(layers):
        place.put(StandIn(place.layer, partial(probe.call, index, place.which)))
    output = model(**probe_inputs(model))
    if probe.calls != list(range(len(layers))):
        raise SplitRefused(f"the layers are not called once each in order, but {probe.calls}")
    probe.finish(output.logits)
    for border in probe.bounds[1:-1]:
        if not probe.crossing[border]:
            raise SplitRefused(f"nothing that depends on earlier layers reaches layer {border}")


def _leaves(tensor: torch.Tensor) -> set[int]:
    """Ids of the leaves that a tensor's graph reaches."""
    if tensor.grad_fn is None:
        return {id(tensor)} if tensor.requires_grad else set()
    found, seen, todo = set(), set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        todo += [parent for parent, _ in node.next_functions if parent is not None]
    return found
