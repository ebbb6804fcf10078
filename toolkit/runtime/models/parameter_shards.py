"""Marks of parameters: the position of a slice in the full parameter, what is partial, what is frozen."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toolkit.checkpoints.element_runs import Region, StridedRange
from toolkit.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A slice along one dimension. The dimension has `packs` equal segments; a rank holds its part of each segment."""

    dim: int
    index: int
    """Index of this rank."""
    ranks: int
    shape: tuple[int, ...]
    """Shape of the full parameter."""
    packs: int = 1

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """The slice of a full tensor."""
        pieces = []
        for segment in full.chunk(self.packs, self.dim):
            sizes = shares(segment.shape[self.dim], self.ranks)
            pieces.append(segment.narrow(self.dim, sum(sizes[: self.index]), sizes[self.index]))
        return torch.cat(pieces, self.dim)

    def ranges(self) -> list[tuple[int, int]]:
        """First index and last + 1 along the dimension, for each segment."""
        segment = self.shape[self.dim] // self.packs
        sizes = shares(segment, self.ranks)
        begin, length = sum(sizes[: self.index]), sizes[self.index]
        return [(pack * segment + begin, pack * segment + begin + length) for pack in range(self.packs)]

    def region(self) -> Region:
        """Elements of the full parameter that the slice holds, in the slice's order."""
        begin, end = self.ranges()[0]
        inner = math.prod(self.shape[self.dim + 1 :])
        pieces = math.prod(self.shape[: self.dim]) * self.packs
        if end == begin or inner == 0:
            return ()
        stride = self.shape[self.dim] // self.packs * inner
        return (StridedRange(begin * inner, (end - begin) * inner, stride if pieces > 1 else 0, pieces),)


def shares(total: int, ranks: int) -> list[int]:
    """Number of rows of `total` that each rank holds: equal shares, rounded up for the first ranks."""
    full = -(-total // ranks)
    return [max(0, min(full, total - rank * full)) for rank in range(ranks)]


def mark_shard(parameter: torch.nn.Parameter, layout: Layout) -> None:
    """Mark a parameter as a slice, for us and for DeepSpeed's gradient norm."""
    parameter.shard_layout = layout  # type: ignore[attr-defined]
    # DeepSpeed 0.19.8 counts a parameter in its norm on every model-parallel rank if either attribute is set, else on
    # the first rank only (`is_model_parallel_parameter`). Without them clipping would miss most of the slices.
    parameter.model_parallel = True  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def layout_of(parameter: torch.Tensor) -> Layout | None:
    """Layout of a parameter that is a slice; None for others."""
    return getattr(parameter, "shard_layout", None)


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Shape of the parameter that ZeRO 3 shards; of any other, its own."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def model_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Shape in the model, whatever slice or shard of the parameter this rank holds."""
    layout = layout_of(parameter)
    return layout.shape if layout else full_shape(parameter)


def mark_experts(parameter: torch.nn.Parameter, layout: Layout) -> None:
    """Mark a parameter as this rank's experts of a full tensor; tensor ranks hold the same ones."""
    parameter.shard_layout = layout  # type: ignore[attr-defined]
    parameter.holds_experts = True  # type: ignore[attr-defined]


def holds_experts(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a slice by experts."""
    return getattr(parameter, "holds_experts", False)


def is_tensor_slice(parameter: torch.Tensor) -> bool:
    """Whether tensor ranks hold different parts of a parameter."""
    return layout_of(parameter) is not None and not holds_experts(parameter)


def mark_partial(parameter: torch.nn.Parameter) -> None:
    """Mark a full parameter of whose gradient each tensor rank computes only a part."""
    parameter.partial_gradient = True  # type: ignore[attr-defined]


def is_partial(parameter: torch.nn.Parameter) -> bool:
    """Whether gradients must be summed over tensor ranks."""
    return getattr(parameter, "partial_gradient", False)


def own_slice(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """The part of a full tensor that this rank keeps."""
    layout = layout_of(parameter)
    return layout.slice_of(full) if layout else full


Sites = dict[int, list[tuple[torch.nn.Module, str]]]
"""Id of a parameter → the modules that hold it, and under which names."""


def sites(model: torch.nn.Module) -> Sites:
    """The modules that hold each parameter; several if it is shared."""
    found: Sites = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((module, key))
    return found


def replace_parameter(where: Sites, old: torch.nn.Parameter, data: torch.Tensor) -> torch.nn.Parameter:
    """Replace a parameter by one with new data in all modules that share it."""
    new = torch.nn.Parameter(data, requires_grad=old.requires_grad)
    layout = layout_of(old)
    if layout:
        (mark_experts if holds_experts(old) else mark_shard)(new, layout)
    if is_partial(old):
        mark_partial(new)
    for module, key in where[id(old)]:
        module._parameters[key] = new
    return new


def freeze(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Exclude parameters from training by the patterns of their names; `BadInput` if one matches nothing."""
    named = dict(model.named_parameters())
    for pattern in patterns:
        found = fnmatch.filter(named, pattern)
        if not found:
            shown = ", ".join(list(named)[:3])
            raise BadInput("model.freeze", f"{pattern} matches no parameter; their names are {shown}, ...")
        for name in found:
            named[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in named.values()):
        raise BadInput("model.freeze", "all parameters are frozen, so there is nothing to train; remove a pattern")
