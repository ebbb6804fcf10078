"""What a rank holds of the training state, in terms that no strategy owns.

A fragment is a view of the memory that the optimizer works on: fill it, and the state is loaded. An engine offers
fragments under Hugging Face names; the checkpoint knows nothing else about it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from toolkit.checkpoints import element_runs
from toolkit.checkpoints.element_runs import Region

WEIGHT = "weight"
"""Kind of the fp32 master; optimizer states have the optimizer's own names."""
BUFFER = "buffer"
"""Kind of a persistent buffer of the model."""


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Elements of one parameter's state on this rank."""

    name: str
    """Hugging Face name of the parameter."""
    kind: str
    """`weight`, `buffer`, or an optimizer state such as `exp_avg`."""
    shape: tuple[int, ...]
    """Of the full parameter."""
    region: Region
    """Which elements of the full parameter."""
    tensor: torch.Tensor
    """The elements, flat: a view, so that writing to it changes the state."""
    copy: int = 0
    """This rank's number among those that hold the same elements; from `copies` on, others save them."""
    copies: int = 1
    """Ranks that hold the same elements."""


class Stateful(Protocol):
    """What an engine offers to checkpoints."""

    def fragments(self) -> Iterator[Fragment]:
        """Everything that this rank holds."""

    def drain(self) -> None:
        """Before `fragments` are saved: bring what is under way between ranks to an end. Collective."""

    def prepare(self, kinds: Mapping[str, Collection[str]], steps: int) -> None:
        """Make room for optimizer states (parameter → kinds) after `steps` updates, so that they can be filled."""

    def refresh(self) -> None:
        """Bring what is derived from masters (16-bit copies, other ranks' copies) up to date. Collective."""

    def counters(self) -> dict[str, float]:
        """Numbers beside the tensors: updates done, learning-rate step, loss scale."""

    def set_counters(self, counters: dict[str, float]) -> None:
        """Go on from these numbers."""


def share(fragments: Iterable[Fragment]) -> list[Fragment]:
    """What this rank writes: all that it alone holds, and its part of what others hold too."""
    by_copies: dict[tuple[int, int], list[Fragment]] = {}
    for fragment in fragments:
        by_copies.setdefault((fragment.copy, fragment.copies), []).append(fragment)
    written: list[Fragment] = []
    for (copy, copies), same in by_copies.items():
        written.extend(_part(same, copy, copies))
    return written


def _part(same: list[Fragment], copy: int, copies: int) -> Iterator[Fragment]:
    """The `copy`-th of `copies` equal parts of fragments laid end to end, kinds of one piece kept together."""
    pieces: dict[tuple[str, Region], list[Fragment]] = {}
    for fragment in same:
        pieces.setdefault((fragment.name, fragment.region), []).append(fragment)
    total = sum(len(kinds) * kinds[0].tensor.numel() for kinds in pieces.values())
    low, high = total * copy // copies, total * (copy + 1) // copies
    begin = 0
    for kinds in pieces.values():
        number, count = kinds[0].tensor.numel(), len(kinds)
        # In whole elements of the piece; both neighbours round alike, so that nothing is lost or doubled.
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
    """Where the elements begin in it."""

    def view(self, like_master: torch.Tensor) -> torch.Tensor:
        """The elements in a tensor laid out as the master."""
        return like_master.detach().view(-1)[self.start : self.start + element_runs.size(self.region)]


def held_fragments(
    held: Iterable[Held], states: dict[torch.Tensor, dict[str, Any]], copy: int = 0, copies: int = 1
) -> Iterator[Fragment]:
    """Masters, and every optimizer state of the same layout."""
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
