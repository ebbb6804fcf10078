"""Training in a real notebook kernel: live curve, interrupts, readable errors; and the notebook that we ship."""

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

from tests import launching_page
from tests.conftest import Trainer
from toolkit.recipe_file import dump_recipe, make_recipe

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "recipes" / "notebooks" / "finetune.ipynb"


class Kernel:
    """A kernel of its own, cell by cell."""

    def __init__(self, directory: Path) -> None:
        self.notebook = nbformat.v4.new_notebook()
        self.client = NotebookClient(
            self.notebook, timeout=300, allow_errors=True, resources={"metadata": {"path": str(directory)}}
        )

    def run(self, source: str) -> list[dict[str, Any]]:
        """What a cell shows."""
        cell = nbformat.v4.new_code_cell(source)
        self.notebook.cells.append(cell)
        self.client.execute_cell(cell, len(self.notebook.cells) - 1)
        return list(cell.outputs)

    def value(self, source: str) -> str:
        return str(self.run(source)[-1]["data"]["text/plain"])


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = Kernel(tmp_path)
    with made.client.setup_kernel(env=dict(os.environ), cwd=str(tmp_path)):
        yield made


def pages(outputs: list[dict[str, Any]]) -> list[str]:
    return [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]


def workers(word: str) -> list[str]:
    """Command lines of workers that have a word in them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "toolkit.worker" in line and word in line:
            found.append(line)
    return found


def test_a_session_in_a_kernel(kernel: Kernel, recipe_mapping: dict[str, Any], tmp_path: Path, train: Trainer) -> None:
    recipe = make_recipe(recipe_mapping, ["strategy={name: zero, zero_stage: 2}"])
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    shown = kernel.run("\n".join(launching_page.commands("Notebook", "python")))
    (page,) = pages(shown)
    assert "step 4/4 · loss " in page
    assert "<polyline points=" in page
    metrics = next((tmp_path / "runs").glob("tiny-*/metrics.jsonl"))
    losses = launching_page.losses(metrics)
    assert f"loss {losses[-1]:.4f}" in page
    assert losses == train("strategy={name: zero, zero_stage: 2}").losses, "as without a notebook, bit for bit"
    assert kernel.value("run.summary['status'], len(run.metrics)") == "('done', 4)"

    (error,) = kernel.run("recipe = 'recipe.yaml'; toolkit.train(recipe, 'train.sterps=3', nproc=2)")
    assert (error["output_type"], error["ename"]) == ("error", "BadInput")
    assert "\n".join(error["traceback"]).count("\n") <= 2, "one readable message, not a page of frames"
    assert "did you mean train.steps?" in error["traceback"][-1]

    *_, error = kernel.run("toolkit.train(recipe, 'train.lr=1e30', 'train.optimizer=sgd', nproc=1)")
    assert error["ename"] == "LossNotFinite"
    assert "at step" in error["evalue"]

    interrupt_at_a_step(kernel, tmp_path / "long")
    *_, error = kernel.run("toolkit.train(recipe, 'train.steps=100000', nproc=2, run_dir='long')")
    assert error["ename"] == "KeyboardInterrupt"
    assert workers("long") == []

    assert kernel.value("toolkit.train(recipe, 'train.steps=1', nproc=1).summary['status']") == "'done'"


def interrupt_at_a_step(kernel: Kernel, run: Path) -> None:
    pid = kernel.client.km.provisioner.pid

    def wait_and_interrupt() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (run / "metrics.jsonl").exists():
            time.sleep(0.1)
        assert workers("long")
        os.kill(pid, signal.SIGINT)

    threading.Thread(target=wait_and_interrupt, daemon=True).start()


def test_the_shipped_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(SHIPPED, as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code"), "shipped without outputs"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    texts = "\n".join(str(output) for outputs in shown for output in outputs)
    assert "plans can run; the first is chosen" in texts
    assert ["step 40/40" in page or "step 60/60" in page for outputs in shown for page in pages(outputs)].count(
        True
    ) == 2
    assert "Beautiful is better than" in texts
    assert "Simple is better than" in texts
