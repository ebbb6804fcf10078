"""Downsample curves for charts without losing extremes."""

from __future__ import annotations

import itertools

import numpy as np

POINTS = 1200
"""Largest number of points per curve, about one per pixel."""


def extremes(values: np.ndarray, points: int = POINTS) -> np.ndarray:
    """Return the indices of the first and last value, and of the extremes of `points / 2` equal intervals."""
    size = len(values)
    if size <= points:
        return np.arange(size)
    bounds = _bounds(size, points // 2)
    kept = [0, size - 1]
    for low, high in itertools.pairwise(bounds.tolist()):
        interval = values[low:high]
        known = np.flatnonzero(~np.isnan(interval))
        if len(known) == 0:
            kept.append(low)  # an interval without values stays visible as a gap
            continue
        kept += [low + known[np.argmin(interval[known])], low + known[np.argmax(interval[known])]]
        if len(known) < len(interval):
            kept.append(low + int(np.flatnonzero(np.isnan(interval))[0]))
    return np.unique(np.array(kept))


def means(values: np.ndarray, points: int = POINTS // 4) -> np.ndarray:
    """Return the means of `points` equal intervals, for stacked charts, in which extremes would distort the sum."""
    size = len(values)
    if size <= points:
        return values
    known = ~np.isnan(values)
    starts = _bounds(size, points)[:-1]
    counts = np.add.reduceat(known.astype(float), starts)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: np.ndarray = np.where(counts > 0, sums / counts, np.nan)
    return found


def _bounds(size: int, intervals: int) -> np.ndarray:
    return np.linspace(0, size, intervals + 1).astype(int)
