"""A sink that must not end a run: what fails is told, and the sink is left out from then on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from toolkit.runtime.metrics.record import Record, Sink


class GuardedSink:
    """Stands before a sink whose failure costs less than the run."""

    def __init__(self, name: str, sink: Sink, say: Callable[[str], object]) -> None:
        self._name, self._sink, self._say = name, sink, say
        self._failed = False

    def start(self, info: Mapping[str, Any]) -> None:
        self._try(self._sink.start, info)

    def log(self, record: Record) -> None:
        self._try(self._sink.log, record)

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """One evaluation, for sinks that want it."""
        if hasattr(self._sink, "evaluated"):
            self._try(self._sink.evaluated, record)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._try(self._sink.finish, summary)

    def _try(self, call: Callable[[Any], None], value: Any) -> None:
        if self._failed:
            return
        try:
            call(value)
        except Exception as error:  # whatever a user's code or a network raises
            self._failed = True
            what = f"{type(error).__name__}: {error}"
            self._say(f"{self._name} failed and gets nothing more; the run goes on, metrics.jsonl has it all ({what})")
