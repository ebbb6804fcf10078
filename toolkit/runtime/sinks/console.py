"""The run on a terminal: a progress bar where there is one, else a line every few steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from toolkit.run_dir.step_parts import COMMUNICATION, COMPARED, MEMORY
from toolkit.runtime.metrics.record import Record
from toolkit.units import GIB, MIB

BAR = 8
"""Characters of the memory bar."""


class ConsoleSink:
    """Writes to the stream that the process was started with; everything else a rank prints goes to its log."""

    def __init__(self, stream: IO[str], steps: int, every: int, memory_limit_bytes: int = 0) -> None:
        self._console = Console(file=stream, width=None if stream.isatty() else 120)
        self._steps, self._every, self._limit = steps, every, memory_limit_bytes
        self._exposed = ""
        self._progress = Progress(
            TextColumn("[bold]train"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
            console=self._console,
            # Whatever else this process prints goes to its log, not between the lines of the bar.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live = self._console.is_terminal
        self._task = self._progress.add_task("train", total=steps, values="")

    def start(self, info: Mapping[str, Any]) -> None:
        if self._live:
            self._progress.start()

    def log(self, record: Record) -> None:
        values = f"loss {record.loss:.4f} · {record.tokens_per_second:,.0f} tokens/s · MFU {record.mfu:.1%}"
        if record.parts:
            held = sum(record.parts.get(name, 0.0) for name in COMMUNICATION)
            self._exposed = f" · exposed communication {held / record.wall_seconds:.0%}"
        values += self._exposed
        if self._live:
            values += self._memory(record.memory_bytes)
            self._progress.update(self._task, completed=record.step, values=values)
        elif record.step % self._every == 0 or record.step in (1, self._steps):
            self._console.print(
                f"step {record.step}/{self._steps} · {values} · grad norm {record.grad_norm:.3f}", highlight=False
            )

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """The evaluator prints its own line."""

    def rewind(self, step: int) -> None:
        """The bar follows the next record."""

    def _memory(self, used: int) -> str:
        """How full the device is, as a bar; without a known limit, the size alone."""
        if not self._limit:
            return f" · memory {_size(used)}"
        filled = min(BAR, round(BAR * used / self._limit))
        return f" · memory {'█' * filled}{'░' * (BAR - filled)} {_size(used)} of {_size(self._limit)}"

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._live:
            self._progress.stop()
        if summary.get("status") == "done":
            self._console.print(_comparison(summary))
            if summary.get("explanation"):
                self._console.print(summary["explanation"], highlight=False, markup=False)
            self._console.print(f"run directory: {summary['run_dir']}", highlight=False, markup=False, soft_wrap=True)


def _comparison(summary: Mapping[str, Any]) -> Table:
    predicted, measured = summary["predicted"], summary["measured"]
    losses = f"loss {summary['first_loss']:.3f} → {summary['final_loss']:.3f}"
    table = Table(title=f"{summary['steps']} steps, {losses}, {summary['seconds']:.1f} s")
    for heading in ("", "predicted", "measured", "measured / predicted"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows = (("step time", "step_seconds", _seconds), ("memory per rank", "memory_bytes", _size))
    for label, key, words in rows:
        table.add_row(label, *_cells(predicted[key], measured[key], words))
    if summary.get("parts"):
        table.add_section()
    for name, part in summary.get("parts", {}).items():
        table.add_row(f"  {COMPARED[name][0]}", *_cells(part["predicted"], part["measured"], _seconds))
    if summary.get("memory_parts"):
        table.add_section()
    for name, part in summary.get("memory_parts", {}).items():
        table.add_row(f"  {MEMORY[name][0]}", *_cells(part["predicted"], part["measured"], _size))
    return table


def _cells(predicted: float, measured: float, words: Callable[[float], str]) -> tuple[str, str, str]:
    return words(predicted), words(measured), f"{measured / predicted:.2f}" if predicted else "–"


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 10 else f"{value:.1f} s"


def _size(value: float) -> str:
    if value >= GIB:
        return f"{value / GIB:.2f} GiB"
    return f"{value / MIB:.0f} MiB" if value >= 10 * MIB or not value else f"{value / MIB:.2f} MiB"
