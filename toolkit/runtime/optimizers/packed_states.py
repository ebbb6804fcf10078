"""Optimizer states in fewer bits: 8 bits with a scale per block, or bf16 with stochastic rounding.

Blocks are 256 consecutive elements of the full parameter, whichever rank holds them, and the noise of rounding depends
on the element alone: so a sharded run stores what one process would. A block that is cut between ranks has one scale,
the maximum over these ranks. Only tensor shards of columns have blocks of their own, unless they are cut at the bounds
of blocks. bitsandbytes 0.50 has 8-bit optimizers, but their blocks start where a rank's tensor starts, and their
kernels compute each scale from one rank's elements: results would depend on the number of ranks.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from toolkit.checkpoints import element_runs
from toolkit.checkpoints.element_runs import Region, StridedRange
from toolkit.runtime.optimizers.update_rules import State

BLOCK = 256
"""Elements with one scale."""
CHUNK = 2**22
"""Elements that are updated at a time: their states are fp32 for that long, 16 MiB each."""
UNSIGNED = ("exp_avg_sq",)
"""States that are never negative."""
Where = slice | torch.Tensor
"""Elements of a flat tensor: a range, or indices."""
Maximum = Callable[[torch.Tensor], torch.Tensor]
"""Maximum over the ranks that share blocks. Collective."""


@dataclass(frozen=True)
class Piece:
    """Elements of one parameter in a tensor that the optimizer updates."""

    name: str
    start: int
    """Where they start in the tensor."""
    region: Region
    """Which elements of the full parameter they are."""


class Packing(Protocol):
    """How the states of one tensor are stored."""

    def places(self) -> Sequence[Where]:
        """Disjoint sets of elements that are updated one after the other; padding is in none of them."""

    def load(self, state: State, kind: str, place: int) -> torch.Tensor:
        """A state of some elements in fp32; `state` holds the stored form."""

    def save(self, state: State, values: Mapping[str, torch.Tensor], place: int, step: int) -> None:
        """Store states of some elements. Collective for the first place."""


def stored_kinds(state: State) -> list[str]:
    """The states of a tensor that are stored, by the name that they have in fp32."""
    return [key.partition("/")[0] for key in state if key.endswith(("/codes", "/bf16"))]


@dataclass(frozen=True)
class Blocks:
    """8 bits per element and a scale per block. The first place has all elements outside of complete blocks."""

    ranges: tuple[slice, ...]
    """Complete blocks, in pieces of at most `CHUNK` elements."""
    edges: torch.Tensor
    """Indices of the elements outside of complete blocks."""
    edge_blocks: torch.Tensor
    """For each of them, the number of its block among the cut ones of this rank."""
    num_edge_blocks: int
    cut: torch.Tensor
    """Numbers of those blocks that other ranks hold parts of, too."""
    shared: torch.Tensor
    """Their numbers among the blocks that are cut on any rank."""
    num_shared: int
    maximum: Maximum

    def places(self) -> Sequence[Where]:
        return [self.edges, *self.ranges]

    def load(self, state: State, kind: str, place: int) -> torch.Tensor:
        codes, scales = state[f"{kind}/codes"][place], state[f"{kind}/scales"][place]
        values = _table(kind not in UNSIGNED, codes.device)[codes.int()]
        each: torch.Tensor = scales[self.edge_blocks] if place == 0 else scales.repeat_interleave(BLOCK)
        return values * each

    def save(self, state: State, values: Mapping[str, torch.Tensor], place: int, step: int) -> None:
        found = self._edge_scales(values) if place == 0 else _block_scales(values)
        for (kind, value), scales in zip(values.items(), found, strict=True):
            each = scales[self.edge_blocks] if place == 0 else scales.repeat_interleave(BLOCK)
            codes = _encode(value / each.clamp(min=torch.finfo(torch.float32).tiny), kind not in UNSIGNED)
            for name, stored in (("codes", codes), ("scales", scales)):
                state.setdefault(f"{kind}/{name}", {})[place] = stored

    def _edge_scales(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Scales of the blocks at the edges, a row for each state."""
        stacked = torch.stack([value.abs() for value in values.values()])
        scales = stacked.new_zeros(len(values), self.num_edge_blocks)
        scales.scatter_reduce_(1, self.edge_blocks.expand_as(stacked), stacked, "amax")
        if self.num_shared:
            table = scales.new_zeros(len(values), self.num_shared)
            table[:, self.shared] = scales[:, self.cut]
            scales[:, self.cut] = self.maximum(table)[:, self.shared]
        return scales


def _block_scales(values: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [value.view(-1, BLOCK).abs().amax(1) for value in values.values()]


@functools.cache
def code_values(signed: bool) -> torch.Tensor:
    """256 values from -1 or 0 to 1, finer near 0, in order: the dynamic tree of 8-bit Adam (Dettmers et al. 2022).

    The lowest is -1, which the tree lacks: the largest element of a block then keeps its exact value, and states that
    are stored, loaded and stored again do not change.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        fractions = 2 ** (exponent + (0 if signed else 1))
        bounds = torch.linspace(0.1, 1.0, fractions + 1, dtype=torch.float64)
        for mean in ((bounds[:-1] + bounds[1:]) / 2).tolist():
            values += [10.0 ** (exponent - 6) * mean] + ([-(10.0 ** (exponent - 6)) * mean] if signed else [])
    found = torch.tensor(sorted(values), dtype=torch.float64).float()
    if signed:
        found[0] = -1.0
    return found


@functools.cache
def _table(signed: bool, device: torch.device) -> torch.Tensor:
    return code_values(signed).to(device)


@functools.cache
def _middles(signed: bool, device: torch.device) -> torch.Tensor:
    values = code_values(signed)
    return ((values[1:] + values[:-1]) / 2).to(device)


def _encode(values: torch.Tensor, signed: bool) -> torch.Tensor:
    """The nearest codes of values between -1 and 1."""
    return torch.bucketize(values, _middles(signed, values.device), out_int32=True).to(torch.uint8)


@dataclass(frozen=True)
class Rounded:
    """bf16 with stochastic rounding: small changes of a large state are not lost, but happen now and then."""

    pieces: tuple[Piece, ...]
    """Of at most `CHUNK` elements each."""

    def places(self) -> Sequence[Where]:
        return [slice(piece.start, piece.start + element_runs.size(piece.region)) for piece in self.pieces]

    def load(self, state: State, kind: str, place: int) -> torch.Tensor:
        found: torch.Tensor = state[f"{kind}/bf16"][place].float()
        return found

    def save(self, state: State, values: Mapping[str, torch.Tensor], place: int, step: int) -> None:
        piece = self.pieces[place]
        for kind, value in values.items():
            noise = _noise(
                piece.region, zlib.crc32(f"{piece.name} {kind}".encode()) ^ (step * 0x9E3779B1), value.device
            )
            bits = (value.contiguous().view(torch.int32) + noise) & -(1 << 16)
            state.setdefault(f"{kind}/bf16", {})[place] = bits.view(torch.float32).bfloat16()


def _noise(region: Region, salt: int, device: torch.device) -> torch.Tensor:
    """16 bits for each element of a parameter, which depend on nothing but the element and `salt`."""
    parts = []
    for run in region:
        rows = torch.arange(run.count, device=device)[:, None] * (run.stride or run.length) + run.start
        parts.append((rows + torch.arange(run.length, device=device)).view(-1))
    bits = torch.cat(parts).to(torch.int32) ^ _signed(salt)
    for factor in (0x45D9F3B, 0x119DE1F3):
        bits = (bits ^ ((bits >> 16) & 0xFFFF)) * factor
    return (bits ^ (bits >> 15)) & 0xFFFF


def _signed(bits: int) -> int:
    """The lowest 32 bits as a signed number."""
    return ((bits & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def rounded(pieces: Sequence[Piece]) -> Rounded:
    """bf16 states of a tensor with these pieces."""
    return Rounded(tuple(part for piece in pieces for part in _chunks(piece)))


def _chunks(piece: Piece) -> Iterator[Piece]:
    total = element_runs.size(piece.region)
    for low in range(0, total, CHUNK):
        region = element_runs.slice_runs(piece.region, low, min(low + CHUNK, total))
        yield Piece(piece.name, piece.start + low, region)


Cut = tuple[str, int]
"""A block that is cut between ranks: name of the parameter, number of the block in it."""


def cut_blocks(name: str, regions: Sequence[Region]) -> set[Cut]:
    """The blocks of a parameter that are cut, from what each rank holds of it."""
    return {
        (name, run.start // BLOCK)
        for region in regions
        for run in _sequences(region)
        if run is not None and run.start % BLOCK
    }


def blocks(pieces: Sequence[Piece], cut: Sequence[Cut], maximum: Maximum, device: torch.device) -> Blocks:
    """8-bit states of a tensor with these pieces. `cut`: all blocks that are cut, in the same order on every rank."""
    ranges: list[slice] = []
    edges: list[torch.Tensor] = []
    numbers: dict[tuple[str, int, int], int] = {}
    owners: list[torch.Tensor] = []
    for piece in pieces:
        start = piece.start
        for order, run in enumerate(_sequences(piece.region)):
            # Columns that are not cut at bounds of blocks have blocks of their own, in the order of the tensor.
            length = run.size if run is not None else element_runs.size(piece.region)
            first, own = (run.start, 0) if run is not None else (0, order + 1)
            low, high = -(-first // BLOCK) * BLOCK - first, (first + length) // BLOCK * BLOCK - first
            low, high = (low, high) if low < high else (length, length)
            ranges += [slice(start + at, start + min(at + CHUNK, high)) for at in range(low, high, CHUNK)]
            for begin, end in ((0, low), (high, length)):
                if begin < end:
                    within = torch.arange(begin, end)
                    edges.append(within + start)
                    found = ((within + first) // BLOCK).tolist()
                    owners.append(torch.tensor([numbers.setdefault((piece.name, own, b), len(numbers)) for b in found]))
            start += length
    held = [(place, numbers[name, 0, block]) for place, (name, block) in enumerate(cut) if (name, 0, block) in numbers]
    empty = torch.empty(0, dtype=torch.long)
    return Blocks(
        ranges=tuple(ranges),
        edges=torch.cat([empty, *edges]).to(device),
        edge_blocks=torch.cat([empty, *owners]).to(device),
        num_edge_blocks=len(numbers),
        cut=torch.tensor([number for _, number in held], dtype=torch.long, device=device),
        shared=torch.tensor([place for place, _ in held], dtype=torch.long, device=device),
        num_shared=len(cut),
        maximum=maximum,
    )


def _sequences(region: Region) -> Iterator[StridedRange | None]:
    """Runs whose elements follow one another, or that are cut at bounds of blocks; else one None for all of them."""
    if all(_is_regular(run) for run in region):
        yield from region
    elif region:
        yield None


def _is_regular(run: StridedRange) -> bool:
    if run.count == 1 or run.stride == run.length:
        return True
    return run.start % BLOCK == 0 and run.length % BLOCK == 0 and run.stride % BLOCK == 0
