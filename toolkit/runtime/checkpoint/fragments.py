"""A rank's part of the training state, in terms that are independent of the strategy.

A fragment is a view of the memory that the optimizer updates: filling it loads the state. An engine offers fragments
under Hugging Face names; a checkpoint knows nothing else about the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from toolkit.checkpoints import element_runs
from toolkit.checkpoints.element_runs import Region

WEIGHT = "weight"
"""Kind of the fp32 master. Kinds of optimizer states have the optimizer's own names."""
BUFFER = "buffer"
"""Kind of a persistent buffer of the model."""
AVERAGE = "average"
"""Kind of the moving average of a weight."""


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Elements of one parameter's state on this rank."""

    name: str
    """Hugging Face name of the parameter."""
    kind: str
    """`weight`, `buffer`, or an optimizer state such as `exp_avg`."""
    shape: tuple[int, ...]
    """Shape of the full parameter."""
    region: Region
    """Elements of the full parameter."""
    tensor: torch.Tensor
    """The elements, flat. A view: writing to it changes the state."""
    copy: int = 0
    """Index of this rank among those that hold the same elements; `copies` if only other ranks save them."""
    copies: int = 1
    """Number of ranks that hold the same elements."""


class Stateful(Protocol):
    """State of an engine, as checkpoints read and write it."""

    def fragments(self) -> Iterator[Fragment]:
        """All fragments that this rank holds."""

    def drain(self) -> None:
        """Before `fragments` are saved: finish communication in transit between ranks. Collective."""

    def prepare(self, kinds: Mapping[str, Collection[str]], steps: int) -> None:
        """Allocate optimizer states (parameter → kinds) after `steps` updates, so that they can be filled."""

    def refresh(self) -> None:
        """Update everything derived from masters: 16-bit copies, copies on other ranks. Collective."""

    def counters(self) -> dict[str, float]:
        """Scalars of the state: updates done, learning-rate step, loss scale."""

    def set_counters(self, counters: dict[str, float]) -> None:
        """Continue from these counters."""


def share(fragments: Iterable[Fragment]) -> list[Fragment]:
    """The fragments that this rank writes: its own, and its part of those that other ranks hold too."""
    by_copies: dict[tuple[int, int], list[Fragment]] = {}
    for fragment in fragments:
        by_copies.setdefault((fragment.copy, fragment.copies), []).append(fragment)
    written: list[Fragment] = []
    for (copy, copies), same in by_copies.items():
        written.extend(_part(same, copy, copies))
    return written


def _part(same: list[Fragment], copy: int, copies: int) -> Iterator[Fragment]:
    """The `copy`-th of `copies` equal parts of concatenated fragments; kinds of one piece stay together."""
    pieces: dict[tuple[str, Region], list[Fragment]] = {}
    for fragment in same:
        pieces.setdefault((fragment.name, fragment.region), []).append(fragment)
    total = sum(len(kinds) * kinds[0].tensor.numel() for kinds in pieces.values())
    low, high = total * copy // copies, total * (copy + 1) // copies
    begin = 0
    for kinds in pieces.values():
        number, count = kinds[0].tensor.numel(), len(kinds)
        # Rounded to complete elements of the piece, equally on neighbouring ranks: nothing is lost or written twice.
        start = min(max(-(-(low - begin) // count), 0), number)
        stop = min(max(-(-(high - begin) // count), 0), number)
        begin += number * count
        if start < stop:
            yield from (_cut(fragment, start, stop) for fragment in kinds)


def _cut(fragment: Fragment, start: int, stop: int) -> Fragment:
    region = element_runs.slice_runs(fragment.region, start, stop)
    return replace(fragment, region=region, tensor=fragment.tensor[start:stop], copy=0, copies=1)


@dataclass(frozen=True, kw_only=True)
class Held:
    """Elements of a parameter inside a tensor that the optimizer updates."""

    name: str
    shape: tuple[int, ...]
    region: Region
    master: torch.Tensor
    """The optimizer's own tensor: one parameter, or a flat partition of many."""
    start: int
    """Where the elements start in `master`."""

    def view(self, like_master: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor that is laid out like the master."""
        return like_master.detach().view(-1)[self.start : self.start + element_runs.size(self.region)]


def held_fragments(
    held: Iterable[Held], states: dict[torch.Tensor, dict[str, Any]], copy: int = 0, copies: int = 1
) -> Iterator[Fragment]:
    """Fragments of masters and of every optimizer state with the same layout."""
    for item in held:
        tensors = {WEIGHT: item.master}
        for key, value in states.get(item.master, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == item.master.shape and value.dim() > 0:
                tensors[key] = value
        for kind, tensor in tensors.items():
            yield Fragment(
                name=item.name,
                kind=kind,
                shape=item.shape,
                region=item.region,
                tensor=item.view(tensor),
                copy=copy,
                copies=copies,
            )
