"""What a layer finds once and uses again when it is recomputed, so that the repetition is of the same micro-batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class _Notes:
    """Values of one forward pass of one layer, in the order in which it asked for them."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.place = 0
        self.repeats = False

    def next(self, compute: Callable[[], Any]) -> Any:
        if not self.repeats:
            self.values.append(compute())
            return self.values[-1]
        self.place += 1
        return self.values[self.place - 1]


class _Running(threading.local):
    """Notes of the layer that runs in this thread; None if it will not be repeated."""

    notes: _Notes | None = None


_running = _Running()


def remembered(compute: Callable[[], T]) -> T:
    """A value of this forward pass of a layer; if the layer is being recomputed, that of its first pass.

    A pipeline recomputes a layer after other micro-batches have passed it, and what waits for the device in the first
    pass must not wait again. Each call of the repetition gets the value of the same call of the first pass.
    """
    found: T = compute() if _running.notes is None else _running.notes.next(compute)
    return found


class _Noted:
    """A pass of a layer: the inner context, with the notes of this layer."""

    def __init__(self, inner: Any, notes: _Notes, *, repeats: bool) -> None:
        self._inner, self._notes, self._repeats = inner, notes, repeats
        self._before: _Notes | None = None

    def __enter__(self) -> None:
        self._before = _running.notes
        self._notes.repeats, self._notes.place = self._repeats, 0
        _running.notes = self._notes
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        _running.notes = self._before
        return self._inner.__exit__(*error)


def with_notes(contexts: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Contexts of the forward pass of a layer and of its repetition, for torch's `checkpoint`, around others."""
    notes = _Notes()
    forward, again = contexts()
    return _Noted(forward, notes, repeats=False), _Noted(again, notes, repeats=True)
