"""Curves: a few points in place of many, and the live loss curve of a notebook cell."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

WIDTH, HEIGHT = 560, 160
REFRESH_SECONDS = 0.5
POINTS = 1200
"""Largest number of points per curve, about one per pixel."""


def in_notebook() -> bool:
    """Return whether this process is an IPython kernel."""
    shell = sys.modules.get("IPython")
    current = shell.get_ipython() if shell is not None else None
    return current is not None and "IPKernelApp" in current.config


class LiveCurve:
    """A context in which the notebook cell shows the loss curve; does nothing outside a notebook."""

    def __init__(self, metrics: Path, steps: int | None) -> None:
        self._metrics, self._steps = metrics, steps
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._handle: Any = None

    def __enter__(self) -> LiveCurve:
        if in_notebook():
            from IPython.display import HTML, display

            self._handle = display(HTML("starting workers ..."), display_id=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._handle is not None:
            self._thread.join()
            self._draw()

    def _watch(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            self._draw()

    def _draw(self) -> None:
        records = read_records(self._metrics)
        if records:
            from IPython.display import HTML

            self._handle.update(HTML(page(records, self._steps)))


def read_records(metrics: Path) -> list[dict[str, Any]]:
    """Read the complete lines of metrics.jsonl; the last one may still be being written."""
    try:
        lines = metrics.read_text(encoding="utf-8").split("\n")[:-1]
    except OSError:
        return []
    return [json.loads(line) for line in lines]


def page(records: list[dict[str, Any]], steps: int | None) -> str:
    """Return the latest figures and the curve as HTML."""
    last = records[-1]
    words = (
        f"step {last['step']}{f'/{steps}' if steps else ''} · loss {last['loss']:.4f} · "
        f"{last['tokens_per_second']:,.0f} tokens/s · MFU {last['mfu']:.1%}"
    )
    return f"<div style='font-family: monospace'>{words}</div>{curve([record['loss'] for record in records])}"


def curve(losses: list[float]) -> str:
    """Return the losses as an SVG line with at most one point per pixel."""
    stride = max(1, len(losses) // WIDTH)
    points = losses[::stride]
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    across = WIDTH / max(1, len(points) - 1)
    path = " ".join(f"{i * across:.1f},{(high - loss) / span * (HEIGHT - 10) + 5:.1f}" for i, loss in enumerate(points))
    box = f"width='{WIDTH}' height='{HEIGHT}' viewBox='0 0 {WIDTH} {HEIGHT}'"
    return f"<svg {box}><polyline points='{path}' fill='none' stroke='#3b82f6' stroke-width='1.5'/></svg>"


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
