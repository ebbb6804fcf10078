"""Parameters of which a rank holds a slice: how the slice lies in the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from toolkit.checkpoints.element_runs import Region, StridedRange


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A slice along one dimension: the whole is `packs` equal segments, and each rank holds its piece of every one."""

    dim: int
    index: int
    """Which of the ranks this is."""
    ranks: int
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    packs: int = 1

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """The slice of a whole tensor."""
        pieces = []
        for segment in whole.chunk(self.packs, self.dim):
            sizes = shares(segment.shape[self.dim], self.ranks)
            pieces.append(segment.narrow(self.dim, sum(sizes[: self.index]), sizes[self.index]))
        return torch.cat(pieces, self.dim)

    def region(self) -> Region:
        """Which elements of the whole the slice holds, in the slice's own order."""
        segment = self.shape[self.dim] // self.packs
        sizes = shares(segment, self.ranks)
        begin, length = sum(sizes[: self.index]), sizes[self.index]
        inner = math.prod(self.shape[self.dim + 1 :])
        stride, outer = self.shape[self.dim] * inner, math.prod(self.shape[: self.dim])
        starts = [(pack * segment + begin) * inner for pack in range(self.packs)]
        if length == 0 or inner == 0:
            return ()
        if self.packs == 1:
            return (StridedRange(starts[0], length * inner, stride if outer > 1 else 0, outer),)
        return tuple(StridedRange(row * stride + start, length * inner) for row in range(outer) for start in starts)


def shares(total: int, ranks: int) -> list[int]:
    """How many of `total` rows each rank holds: as even as whole rows allow, the first ranks full."""
    full = -(-total // ranks)
    return [max(0, min(full, total - rank * full)) for rank in range(ranks)]


def mark_shard(parameter: torch.nn.Parameter, layout: Layout) -> None:
    """Say that a parameter is a slice, to us and to DeepSpeed's gradient norm."""
    parameter.shard_layout = layout  # type: ignore[attr-defined]
    # DeepSpeed (0.19) counts a parameter on every model-parallel rank if either name is set, else on the first only.
    parameter.model_parallel = True  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def layout_of(parameter: torch.Tensor) -> Layout | None:
    """How the slice lies, if it is one."""
    return getattr(parameter, "shard_layout", None)


def mark_partial(parameter: torch.nn.Parameter) -> None:
    """Say that each tensor rank finds only a part of a whole parameter's gradient."""
    parameter.partial_gradient = True  # type: ignore[attr-defined]


def is_partial(parameter: torch.nn.Parameter) -> bool:
    """Whether gradients of tensor ranks must be summed."""
    return getattr(parameter, "partial_gradient", False)


def own_slice(parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """What a rank keeps of a whole tensor, in storage of its own."""
    layout = layout_of(parameter)
    return (layout.take(whole) if layout else whole).to(parameter.dtype).clone()


Sites = dict[int, list[tuple[torch.nn.Module, str]]]
"""Identity of a parameter → the modules that hold it, and under which names."""


def sites(model: torch.nn.Module) -> Sites:
    """Where every parameter is held: in several places where it is shared."""
    found: Sites = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((module, key))
    return found


def replace_parameter(where: Sites, old: torch.nn.Parameter, data: torch.Tensor) -> torch.nn.Parameter:
    """Put new data where a parameter was, everywhere where it is shared."""
    new = torch.nn.Parameter(data, requires_grad=old.requires_grad)
    layout = layout_of(old)
    if layout:
        mark_shard(new, layout)
    if is_partial(old):
        mark_partial(new)
    for module, key in where[id(old)]:
        module._parameters[key] = new
    return new
