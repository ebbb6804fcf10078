"""The run on a terminal: a progress bar where there is one, else a line every few steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from toolkit.runtime.metrics import Record

GIB = 2**30
MIB = 2**20


class ConsoleSink:
    """Writes to the stream that the process was started with; everything else a rank prints goes to its log."""

    def __init__(self, stream: IO[str], steps: int, every: int) -> None:
        self._console = Console(file=stream, width=None if stream.isatty() else 120)
        self._steps, self._every = steps, every
        self._progress = Progress(
            TextColumn("[bold]train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(),
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
        if self._live:
            self._progress.update(self._task, completed=record.step, values=values)
        elif record.step % self._every == 0 or record.step in (1, self._steps):
            self._console.print(
                f"step {record.step}/{self._steps} · {values} · grad norm {record.grad_norm:.3f}", highlight=False
            )

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._live:
            self._progress.stop()
        if summary.get("status") == "done":
            self._console.print(_comparison(summary))
            self._console.print(f"run directory: {summary['run_dir']}", highlight=False, soft_wrap=True)


def _comparison(summary: Mapping[str, Any]) -> Table:
    predicted, measured = summary["predicted"], summary["measured"]
    losses = f"loss {summary['first_loss']:.3f} → {summary['final_loss']:.3f}"
    table = Table(title=f"{summary['steps']} steps, {losses}, {summary['seconds']:.1f} s")
    for heading in ("", "predicted", "measured", "measured / predicted"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows = (("step time", "step_seconds", _seconds), ("memory a rank", "memory_bytes", _size))
    for label, key, words in rows:
        ratio = measured[key] / predicted[key] if predicted[key] else float("nan")
        table.add_row(label, words(predicted[key]), words(measured[key]), f"{ratio:.2f}")
    return table


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 10 else f"{value:.1f} s"


def _size(value: float) -> str:
    return f"{value / GIB:.2f} GiB" if value >= GIB else f"{value / MIB:.0f} MiB"
