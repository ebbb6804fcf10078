"""Which elements of a parameter a tensor holds: runs of the flattened full parameter, in the order of the tensor.

A flat range is one run, a slice along any dim is one strided run, and the part of a tensor shard that ZeRO assigns to a
rank is a piece of such a run. So the layout of every strategy is a list of runs, and converting one layout into another
is an intersection.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StridedRange:
    """`count` pieces of `length` elements each, `stride` apart."""

    start: int
    """Flat index of the first element in the full parameter."""
    length: int
    """Elements of one piece."""
    stride: int = 0
    """Distance from the start of a piece to the start of the next."""
    count: int = 1
    """Number of pieces."""

    @property
    def size(self) -> int:
        """Number of elements in all pieces."""
        return self.length * self.count

    @property
    def end(self) -> int:
        """Flat index after the last element."""
        return self.start + (self.count - 1) * self.stride + self.length


MOST_PIECES = 2**25
"""Largest number of pieces of one parameter: 64 tensor shards of an embedding with half a million rows."""
Region = tuple[StridedRange, ...]
"""Elements of a parameter, in the order in which a tensor holds them."""


@dataclass(frozen=True)
class Overlap:
    """Elements that two regions share, contiguous in both."""

    first: int
    """Their position in the first region."""
    second: int
    """Their position in the second region."""
    length: int


def flat(start: int, stop: int) -> Region:
    """The elements from `start` to `stop` of the flattened parameter."""
    return (StridedRange(start, stop - start),) if stop > start else ()


def box(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> Region:
    """The sub-tensor with these offsets and lengths, in row-major order: a tensor shard."""
    if math.prod(lengths) == 0:
        return ()
    cut = max((dim for dim in range(len(shape)) if lengths[dim] != shape[dim]), default=None)
    if cut is None:
        return flat(0, math.prod(shape))
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = lengths[cut] * strides[cut]
    if cut == 0:
        return flat(offsets[0] * strides[0], offsets[0] * strides[0] + length)
    first = offsets[cut] * strides[cut]
    outer = itertools.product(*(range(offsets[d], offsets[d] + lengths[d]) for d in range(cut - 1)))
    above = cut - 1
    return tuple(
        StridedRange(
            first + offsets[above] * strides[above] + sum(i * strides[d] for d, i in enumerate(index)),
            length,
            strides[above],
            lengths[above],
        )
        for index in outer
    )


def size(region: Region) -> int:
    """Number of elements in a region."""
    return sum(run.size for run in region)


def slice_runs(region: Region, start: int, stop: int) -> Region:
    """Elements `start` to `stop` of a region, counted in its own order."""
    parts: list[StridedRange] = []
    begin = 0
    for run in region:
        low, high = max(start - begin, 0), min(stop - begin, run.size)
        if low < high:
            parts.extend(_slice_run(run, low, high))
        begin += run.size
    return tuple(parts)


def _slice_run(run: StridedRange, low: int, high: int) -> Iterator[StridedRange]:
    """Elements `low` to `high` of a run: the end of a piece, complete pieces, the beginning of a piece."""
    first, head = divmod(low, run.length)
    last, tail = divmod(high, run.length)
    if first == last:
        yield StridedRange(run.start + first * run.stride + head, tail - head)
        return
    if head:
        yield StridedRange(run.start + first * run.stride + head, run.length - head)
        first += 1
    if last > first:
        count = last - first
        yield StridedRange(run.start + first * run.stride, run.length, run.stride if count > 1 else 0, count)
    if tail:
        yield StridedRange(run.start + last * run.stride, tail)


def within(region: Region, low: int, high: int) -> tuple[int, Region]:
    """The elements between two positions of the parameter: (where they start in the region, their runs from `low` on).

    They must be contiguous in the region, and no piece of a run may cross a bound: so it is for complete rows.
    """
    position, first = 0, -1
    parts: list[StridedRange] = []
    for run in region:
        if run.count == 1 or run.stride == run.length:
            begin, end = max(run.start, low), min(run.start + run.size, high)
            skipped, part = begin - run.start, StridedRange(begin - low, max(end - begin, 0))
        else:
            begin, end = (min(max(-(-(at - run.start) // run.stride), 0), run.count) for at in (low, high))
            skipped, count = begin * run.length, max(end - begin, 0)
            stride = run.stride if count > 1 else 0
            part = StridedRange(run.start + begin * run.stride - low, run.length, stride, count)
        if part.size:
            first = position + skipped if first < 0 else first
            parts.append(part)
        position += run.size
    return max(first, 0), tuple(parts)


def overlaps(first: Region, second: Region) -> Iterator[Overlap]:
    """Elements that two regions of a parameter share, in the order of the parameter."""
    mine, theirs = _segments(first), _segments(second)
    i = j = 0
    while i < len(mine) and j < len(theirs):
        (start_a, length_a, local_a), (start_b, length_b, local_b) = mine[i], theirs[j]
        low, high = max(start_a, start_b), min(start_a + length_a, start_b + length_b)
        if low < high:
            yield Overlap(local_a + low - start_a, local_b + low - start_b, high - low)
        if start_a + length_a <= start_b + length_b:
            i += 1
        else:
            j += 1


def _segments(region: Region) -> list[tuple[int, int, int]]:
    """(position in the parameter, length, position in the region) of every piece, in the order of the parameter."""
    found: list[tuple[int, int, int]] = []
    local = 0
    for run in region:
        if run.stride == run.length or run.count == 1:
            found.append((run.start, run.size, local))
        else:
            found.extend((run.start + i * run.stride, run.length, local + i * run.length) for i in range(run.count))
        local += run.size
    return sorted(found)


def cover(regions: Sequence[Region], numel: int) -> str | None:
    """Why the regions do not cover a parameter of `numel` elements exactly once; None if they do.

    Sizes are compared first: a run of a few digits can stand for more pieces than memory holds.
    """
    outside = next((run for region in regions for run in region if run.end > numel), None)
    if outside is not None:
        return f"{outside} ends at element {outside.end}; the parameter has {numel}"
    stored = sum(map(size, regions))
    if stored > numel:
        return f"{stored} elements found; {numel} are required: some are stored twice"
    num_pieces = sum(run.count for region in regions for run in region)
    if num_pieces > MOST_PIECES:
        return f"{num_pieces} pieces found; at most {MOST_PIECES} are read"
    end = 0
    for start, length, _ in sorted(segment for region in regions for segment in _segments(region)):
        if start != end:
            return f"elements {end} to {start} are missing" if start > end else f"element {start} is stored twice"
        end = start + length
    return None if end == numel else f"{end} elements found; {numel} are required"


def to_json(region: Region) -> list[list[int]]:
    """JSON form of a region: `[start, length]` or `[start, length, stride, count]` for each run."""
    return [
        [run.start, run.length] if run.count == 1 else [run.start, run.length, run.stride, run.count] for run in region
    ]


def from_json(given: object) -> Region:
    """The region written by `to_json`; raises `ValueError` if it is malformed."""
    if not isinstance(given, list):
        raise ValueError("runs are not a list")
    runs = []
    for item in given:
        if not isinstance(item, list) or len(item) not in (2, 4) or not all(type(n) is int and n >= 0 for n in item):
            raise ValueError(f"{item!r} is not a run")
        runs.append(StridedRange(*item))
        if runs[-1].length < 1 or runs[-1].count < 1:
            raise ValueError(f"{item!r} is an empty run")
    return tuple(runs)
