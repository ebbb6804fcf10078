"""Fewer points for a chart, with every extreme kept."""

from __future__ import annotations

import itertools

import numpy as np

POINTS = 1200
"""Points of one curve, at most: more than a screen has pixels for."""


def extremes(values: np.ndarray, points: int = POINTS) -> np.ndarray:
    """Indices of the first and last value, and of the smallest and largest of each of `points / 2` stretches."""
    size = len(values)
    if size <= points:
        return np.arange(size)
    bounds = _bounds(size, points // 2)
    kept = [0, size - 1]
    for low, high in itertools.pairwise(bounds.tolist()):
        stretch = values[low:high]
        known = np.flatnonzero(~np.isnan(stretch))
        if len(known) == 0:
            kept.append(low)  # a stretch without values stays visible as a gap
            continue
        kept += [low + known[np.argmin(stretch[known])], low + known[np.argmax(stretch[known])]]
        if len(known) < len(stretch):
            kept.append(low + int(np.flatnonzero(np.isnan(stretch))[0]))
    return np.unique(np.array(kept))


def means(values: np.ndarray, points: int = POINTS // 4) -> np.ndarray:
    """Means of equal stretches: for what is stacked, where extremes of one part would hide the sum."""
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


def _bounds(size: int, stretches: int) -> np.ndarray:
    return np.linspace(0, size, stretches + 1).astype(int)
