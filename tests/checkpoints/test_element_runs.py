"""Regions against plain index arithmetic."""

from __future__ import annotations

import random

import pytest

from toolkit.checkpoints.element_runs import (
    Region,
    StridedRange,
    box,
    cover,
    flat,
    from_json,
    overlaps,
    size,
    slice_runs,
    to_json,
    within,
)


def elements(region: Region) -> list[int]:
    """Every flat index, in the region's order."""
    return [run.start + i * run.stride + k for run in region for i in range(run.count) for k in range(run.length)]


def box_elements(shape: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...]) -> list[int]:
    indices = [0]
    for n, offset, length in zip(shape, offsets, lengths, strict=True):
        indices = [index * n + offset + i for index in indices for i in range(length)]
    return indices


def random_box(rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 4)))
    offsets = tuple(rng.randrange(n) for n in shape)
    lengths = tuple(rng.randint(1, n - offset) for n, offset in zip(shape, offsets, strict=True))
    return shape, offsets, lengths


def test_a_box_is_what_slicing_gives() -> None:
    rng = random.Random(0)
    for _ in range(500):
        shape, offsets, lengths = random_box(rng)
        assert elements(box(shape, offsets, lengths)) == box_elements(shape, offsets, lengths)


def test_a_column_slice_is_one_run() -> None:
    assert box((4096, 4096), (0, 1024), (4096, 1024)) == (StridedRange(1024, 1024, 4096, 4096),)


def test_a_part_of_a_region_keeps_its_order() -> None:
    rng = random.Random(1)
    for _ in range(500):
        region = box(*random_box(rng)) + flat(1000, 1000 + rng.randint(0, 3))
        low, high = sorted(rng.randint(0, size(region)) for _ in range(2))
        assert elements(slice_runs(region, low, high)) == elements(region)[low:high]


def test_elements_between_two_rows_of_a_stack() -> None:
    """Columns 1 and 2 of two matrices of 3 by 4, one after the other: those of the second matrix."""
    region = (StridedRange(1, 2, 4, 6),)
    start, second = within(region, 12, 24)
    assert (start, second) == (6, (StridedRange(1, 2, 4, 3),))
    assert within(flat(5, 20), 12, 24) == (7, flat(0, 8))
    assert within(flat(0, 12), 12, 24) == (0, ())


def test_overlaps_are_the_shared_elements() -> None:
    rng = random.Random(2)
    for _ in range(500):
        shape = tuple(rng.randint(1, 6) for _ in range(3))
        first, second = (_box_in(shape, rng) for _ in range(2))
        found = [
            (elements(first)[o.first + k], elements(second)[o.second + k])
            for o in overlaps(first, second)
            for k in range(o.length)
        ]
        assert all(a == b for a, b in found)
        assert sorted(a for a, _ in found) == sorted(set(elements(first)) & set(elements(second)))


def _box_in(shape: tuple[int, ...], rng: random.Random) -> Region:
    offsets = tuple(rng.randrange(n) for n in shape)
    lengths = tuple(rng.randint(1, n - offset) for n, offset in zip(shape, offsets, strict=True))
    whole = box(shape, offsets, lengths)
    return slice_runs(whole, rng.randint(0, 2), size(whole))


def test_cover_finds_gaps_and_doubles() -> None:
    left, right = box((4, 6), (0, 0), (4, 3)), box((4, 6), (0, 3), (4, 3))
    assert cover([left, right], 24) is None
    assert "missing" in str(cover([right], 24))
    assert "twice" in str(cover([left, left, right], 24))
    assert "18 elements" in str(cover([flat(0, 18)], 24))


def test_json_and_back() -> None:
    region = box((4, 6), (1, 2), (3, 2)) + flat(0, 5)
    assert from_json(to_json(region)) == region
    for bad in (None, [[1]], [[-1, 2]], [[0, 0]], [[0, 1.5]], [[0, True]], [[0, 1, 2, 0]]):
        with pytest.raises(ValueError, match="run"):
            from_json(bad)
