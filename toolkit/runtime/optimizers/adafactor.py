"""Adafactor (Shazeer and Stern 2018) as torch defines it: of a matrix's second moment only means of rows and columns.

The means are of complete rows and columns, and updates are scaled by root mean squares of complete parameters. A rank
that holds pieces sums what it has; the sums of all pieces are added over ranks, twice per update. torch 2.13's
`torch.optim.Adafactor` sees a flat partition as one vector, which has no rows, and would keep a complete second moment.
Checkpoints hold the second moment that rows and columns stand for, element by element: they fit every strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.checkpoints.element_runs import Region
from toolkit.recipe.sections import Train
from toolkit.runtime.optimizers.packed_states import Piece, positions

DECAY = -0.8
"""Exponent of the share of a new gradient in the second moment: step ** -0.8."""
LEAST_SIZE = 1e-3
"""Root mean square below which parameters still move as if they had it."""
LARGEST_UPDATE = 1.0
"""Root mean square above which an update is scaled down."""
SQUARE = "exp_avg_sq"


@dataclass(frozen=True)
class Factors:
    """Where the sums of a parameter are in the vector of all sums of a tensor."""

    shape: tuple[int, ...]
    """Of the full parameter."""
    start: int
    piece: Piece | None
    """This rank's elements; None if it has none."""

    @property
    def is_matrix(self) -> bool:
        """Whether rows and columns are kept instead of all elements."""
        return len(self.shape) > 1

    @property
    def num_rows(self) -> int:
        """Rows of all matrices of a stack."""
        return math.prod(self.shape[:-1]) if self.is_matrix else 0

    @property
    def num_columns(self) -> int:
        """Columns of all matrices of a stack."""
        return math.prod(self.shape) // self.shape[-2] if self.is_matrix else 0

    @property
    def stop(self) -> int:
        """End of the sums: rows, columns, squares of the parameter."""
        return self.start + self.num_rows + self.num_columns + 1

    def places(self, region: Region, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column of each element."""
        flat, width = positions(region, device), self.shape[-1]
        matrix = self.shape[-2] * width
        return flat // width, flat // matrix * width + flat % width

    def split(self, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Means of rows and of columns from the vector of all sums."""
        between = self.start + self.num_rows
        rows, columns = sums[self.start : between], sums[between : self.stop - 1]
        return rows / self.shape[-1], columns / self.shape[-2]


Sum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(values, whether each belongs to a parameter that is cut between tensor ranks) → sums over ranks. Collective."""


@dataclass(frozen=True)
class Layout:
    """The parameters in one of the optimizer's tensors."""

    parameters: tuple[Factors, ...]
    sliced: torch.Tensor
    """For every parameter, whether tensor ranks hold different parts."""
    sum_over_ranks: Sum

    def held(self) -> Iterator[tuple[int, Factors, Piece, slice]]:
        """(number, parameter, this rank's piece, where it is in the tensor)."""
        for number, one in enumerate(self.parameters):
            if one.piece is not None:
                length = sum(run.size for run in one.piece.region)
                yield number, one, one.piece, slice(one.piece.start, one.piece.start + length)

    def sums(self, squares: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sums of rows and columns of `squares`, and of squared weights, of complete parameters. Collective."""
        found = squares.new_zeros(self.parameters[-1].stop)
        for _, one, piece, here in self.held():
            if one.is_matrix:
                rows, columns = one.places(piece.region, squares.device)
                found.index_add_(0, rows + one.start, squares[here])
                found.index_add_(0, columns + one.start + one.num_rows, squares[here])
            found[one.stop - 1] = weights[here].square().sum()
        lengths = torch.tensor([one.stop - one.start for one in self.parameters], device=squares.device)
        return self.sum_over_ranks(found, self.sliced.repeat_interleave(lengths))


class Adafactor(torch.optim.Optimizer):
    """Adafactor; `step` does nothing before `begin` (see `LayerwiseOptimizer`)."""

    def __init__(self, parameters: Iterable[Any], train: Train, lr: float) -> None:
        self._layouts: Mapping[torch.Tensor, Layout] = {}
        super().__init__(parameters, {"lr": lr, "weight_decay": train.weight_decay})

    def begin(self, layouts: Mapping[torch.Tensor, Layout]) -> None:
        """Take steps from now on."""
        self._layouts = layouts

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every tensor that has a gradient. Collective."""
        for group in self.param_groups if self._layouts else ():
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, float(group["lr"]), float(group["weight_decay"]))

    def _update(self, weight: torch.Tensor, lr: float, decay: float) -> None:
        assert weight.grad is not None
        layout, state = self._layouts[weight], self.state[weight]
        values, gradient = weight.view(-1), weight.grad.view(-1)
        state["step"] = step = int(state.get("step", 0)) + 1
        sums = layout.sums(gradient.square(), values)
        self._follow(layout, state, sums, gradient, step**DECAY)
        weight.mul_(1 - lr * decay)
        tiny = torch.finfo(torch.float32).eps ** 2
        updates = {
            number: gradient[here] * _expanded(number, one, piece, state).clamp_(min=tiny).rsqrt_()
            for number, one, piece, here in layout.held()
        }
        lengths = values.new_zeros(len(layout.parameters))
        for number, update in updates.items():
            lengths[number] = update.square().sum()
        lengths = layout.sum_over_ranks(lengths, layout.sliced)
        for number, one, _, here in layout.held():
            count = math.prod(one.shape)
            size = (sums[one.stop - 1] / count).sqrt().clamp(min=LEAST_SIZE)
            shorter = ((lengths[number] / count).sqrt() / LARGEST_UPDATE).clamp(min=1.0)
            values[here] -= updates[number] * (size / shorter * min(lr, step**-0.5))

    def _follow(
        self, layout: Layout, state: dict[str, Any], sums: torch.Tensor, gradient: torch.Tensor, new: float
    ) -> None:
        """Move the second moments towards the squared gradients by a share of `new`."""
        means = state.setdefault("rows and columns", {})
        for number, one in enumerate(layout.parameters):
            if one.is_matrix:
                found = one.split(sums)
                kept = means.setdefault(number, tuple(torch.zeros_like(part) for part in found))
                for old, part in zip(kept, found, strict=True):
                    old.lerp_(part, new)
        whole = state.setdefault("elements", {})
        for number, one, _, here in layout.held():
            if not one.is_matrix:
                square = gradient[here].square()
                whole.setdefault(number, torch.zeros_like(square)).lerp_(square, new)

    def expanded(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The second moment of every element, in host memory; changes are kept until `pack`."""
        state = self.state.get(weight, {})
        found = {kind: value for kind, value in state.items() if isinstance(value, torch.Tensor)}
        if SQUARE in found or weight not in self._layouts or "step" not in state:
            return found
        flat = torch.zeros(weight.numel())
        for number, one, piece, here in self._layouts[weight].held():
            flat[here] = _expanded(number, one, piece, state).cpu()
        return found | {SQUARE: flat.view(weight.shape)}

    @torch.no_grad()
    def pack(self) -> None:
        """Take the means of second moments that were loaded from a checkpoint. Collective."""
        for weight, layout in self._layouts.items():
            state = self.state[weight]
            if SQUARE not in state:
                continue
            squares = state.pop(SQUARE).to(weight.device).view(-1)
            sums = layout.sums(squares, weight.view(-1))
            state["rows and columns"], state["elements"] = {}, {}
            for number, one in enumerate(layout.parameters):
                if one.is_matrix:
                    state["rows and columns"][number] = tuple(part.clone() for part in one.split(sums))
            for number, one, _, here in layout.held():
                if not one.is_matrix:
                    state["elements"][number] = squares[here].clone()


def _expanded(number: int, one: Factors, piece: Piece, state: Mapping[str, Any]) -> torch.Tensor:
    """The second moment of a piece, in a new tensor."""
    if not one.is_matrix:
        whole: torch.Tensor = state["elements"][number]
        return whole.clone()
    rows, columns = state["rows and columns"][number]
    means = rows.view(-1, one.shape[-2]).mean(1).clamp(min=torch.finfo(torch.float32).eps)
    row, column = one.places(piece.region, rows.device)
    found: torch.Tensor = (rows / means.repeat_interleave(one.shape[-2]))[row] * columns[column]
    return found


def factors(shapes: Sequence[tuple[int, ...]], pieces: Sequence[Piece | None]) -> tuple[Factors, ...]:
    """The parameters of a tensor, with their places among its sums."""
    found: list[Factors] = []
    for shape, piece in zip(shapes, pieces, strict=True):
        found.append(Factors(shape, found[-1].stop if found else 0, piece))
    return tuple(found)
