"""Training in a real notebook kernel: live curve, interrupts, readable errors, and the shipped notebook."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers import launching_page

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "recipes" / "notebooks" / "finetune.ipynb"


class Kernel:
    """A kernel with the shipped notebook; more cells can be appended."""

    def __init__(self, directory: Path) -> None:
        self.notebook = nbformat.read(SHIPPED, as_version=4)
        self._shipped = list(enumerate(self.notebook.cells))
        self.client = NotebookClient(
            self.notebook, timeout=300, allow_errors=True, resources={"metadata": {"path": str(directory)}}
        )

    def run_shipped(self) -> list[list[dict[str, Any]]]:
        """Run every code cell of the shipped notebook and return the outputs of each."""
        cells = [(number, cell) for number, cell in self._shipped if cell.cell_type == "code"]
        assert all(not cell.outputs for _, cell in cells), "shipped without outputs"
        return [self._execute(cell, number) for number, cell in cells]

    def run(self, source: str) -> list[dict[str, Any]]:
        """Append a cell, run it and return its outputs."""
        self.notebook.cells.append(nbformat.v4.new_code_cell(source))
        return self._execute(self.notebook.cells[-1], len(self.notebook.cells) - 1)

    def value(self, source: str) -> str:
        return str(self.run(source)[-1]["data"]["text/plain"])

    def _execute(self, cell: Any, number: int) -> list[dict[str, Any]]:
        self.client.execute_cell(cell, number)
        return list(cell.outputs)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = Kernel(tmp_path)
    with made.client.setup_kernel(env=dict(os.environ), cwd=str(tmp_path)):
        yield made


def pages(outputs: list[dict[str, Any]]) -> list[str]:
    return [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]


def workers(word: str) -> list[str]:
    """Command lines of running workers that contain a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "toolkit.worker" in line and word in line:
            found.append(line)
    return found


def test_a_session_in_a_kernel(kernel: Kernel, tmp_path: Path, launch_reference: list[float]) -> None:
    """An error, an interrupt, the commands of docs/launching.md, then the shipped notebook: all in one kernel."""
    launching_page.workspace(tmp_path)
    (error,) = kernel.run("import toolkit; toolkit.train('recipe.yaml', 'train.sterps=3', nproc=2)")
    assert (error["output_type"], error["ename"]) == ("error", "BadInput")
    assert "\n".join(error["traceback"]).count("\n") <= 2, "one readable message, not a page of frames"
    assert "did you mean train.steps?" in error["traceback"][-1]

    interrupt_at_a_step(kernel, tmp_path / "long")
    *_, error = kernel.run("toolkit.train('recipe.yaml', 'train.steps=100000', nproc=2, run_dir='long')")
    assert error["ename"] == "KeyboardInterrupt"
    assert workers(str(tmp_path / "long")) == []
    assert workers(" long") == []

    shown = kernel.run("\n".join(launching_page.commands("Notebook", "python")))
    (page,) = pages(shown)
    assert "step 3/3 · loss " in page
    assert "<polyline points=" in page
    losses = launching_page.losses(next((tmp_path / "runs").glob("tiny-*/metrics.jsonl")))
    assert losses == launch_reference[:3], "bit-identical to a run without a notebook"
    assert f"loss {losses[-1]:.4f}" in page
    assert kernel.value("run.summary['status'], len(run.metrics)") == "('done', 3)"

    assert_shipped(kernel.run_shipped())


def assert_shipped(shown: list[list[dict[str, Any]]]) -> None:
    texts = "\n".join(str(output) for outputs in shown for output in outputs)
    assert "'output_type': 'error'" not in texts, texts[-3000:]
    assert "plans can run; the first is chosen" in texts
    found = [page for outputs in shown for page in pages(outputs)]
    assert ["step 40/40" in page or "step 60/60" in page for page in found].count(True) == 2
    assert "Beautiful is better than" in texts
    assert "Simple is better than" in texts


def interrupt_at_a_step(kernel: Kernel, run: Path) -> None:
    pid = kernel.client.km.provisioner.pid

    def wait_and_interrupt() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (run / "metrics.jsonl").exists():
            time.sleep(0.1)
        assert workers("long")
        os.kill(pid, signal.SIGINT)

    threading.Thread(target=wait_and_interrupt, daemon=True).start()
