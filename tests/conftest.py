"""Shared by all tests: tiny recipes, and real worker processes from a warm fork server."""

from __future__ import annotations

import functools
import gc
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports the hub's client: no test needs the network
# Before anything imports torch, and inherited by every process that a test starts: threads of OpenMP that wait for
# work sleep. By default they spin, and on cores that other tests need that costs up to ten times the work itself.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from benchmarks.harness.tiny_llama import TINY_LLAMA
from tests.helpers import launching_page
from toolkit.launching import environment, launchers
from toolkit.recipe.file import make_recipe
from toolkit.run_dir.layout import RunDir
from toolkit.runtime.supervision import supervise
from toolkit.runtime.supervision.warm_pool import Enter, WarmProcess, preload, run_warm
from toolkit.sessions.resolve import resolve

gc.disable()  # until all tests are imported: imports make next to no garbage, and looking for it takes seconds
environment.enter_processor_environment()  # tests compute in this process, too
# Tests of adapters fork dozens of workers, each of which would import peft for three seconds; those that are the first
# to read some data would import datasets, with pandas; and each of thousands of workers would import its model.
MODELS = ("llama", "gpt2", "mixtral", "qwen3", "gpt_oss", "gemma2", "bert")
preload("peft", "datasets", *(f"transformers.models.{name}.modeling_{name}" for name in MODELS))

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away"]


LONGEST = (
    "commands/test_hosts.py",
    "commands/test_slurm.py",
    "commands/test_launchers.py",
    "security/test_closed_door.py",
    "runtime/checkpoint/test_checkpoint.py",
    "commands/test_ray.py",
    "runtime/mixtures/test_expert_parallel.py",
    "runtime/rehearsal/test_rehearsal.py",
    "test_notebook.py",
    "runtime/test_start.py",
    "runtime/corpus/test_format_training.py",
    "test_recipes.py",
    "runtime/test_objectives.py",
    "runtime/proofs/test_coverage.py",
    "runtime/test_adapters.py",
    "runtime/supervision/test_supervise.py",
    "runtime/layers/test_compiled_layers.py",
    "runtime/layers/test_fused_kernels.py",
    "commands/test_resume.py",
    "launching/test_launch_files.py",
    "runtime/proofs/test_autotp.py",
    "runtime/rehearsal/test_host_waits.py",
    "security/test_foreign_code.py",
    "security/test_other_user.py",
)
"""Files that take 20 s of CPU time or a minute: begun last, one would keep a core busy while the other has no work."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first; the order within a file stays."""
    gc.freeze()  # what has been imported is no garbage, whenever a test has it collected
    gc.enable()
    tests = Path(__file__).parent
    places = {tests / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A jsonl of documents of different lengths."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    documents = [" ".join(WORDS[i % 7 :] * (1 + i % 3)) for i in range(40)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture
def recipe_mapping(text_file: Path) -> dict[str, Any]:
    """A recipe that trains in a second. `auto` would make tensor ranks of two processes, which are proven first."""
    return {
        "name": "tiny",
        "model": {"config": dict(TINY_LLAMA), "precision": "fp32"},
        "data": {"path": str(text_file), "tokenizer": "bytes", "seq_len": 32},
        "strategy": {"name": "data_parallel"},
        "train": {"global_batch": 8, "steps": 4, "lr": 1e-2, "warmup": 0.25},
        "metrics": {"console": False, "wandb": {"mode": "disabled"}},
    }


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    run: RunDir
    codes: list[int]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run.metrics.read_text().splitlines()]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(self.run.summary.read_text())  # type: ignore[no-any-return]

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records]

    @property
    def norms(self) -> list[float]:
        return [record["grad_norm"] for record in self.records]


Trainer = Callable[..., Finished]


@pytest.fixture(scope="session")
def references() -> dict[tuple[str, ...], Finished]:
    """Runs in one process that several tests compare with: overrides → run."""
    return {}


@pytest.fixture(scope="session")
def launch_reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses that every way to launch must give, bit for bit: of the page's recipe in two warm workers."""
    directory = tmp_path_factory.mktemp("reference") / "run"
    resolved = resolve(make_recipe(launching_page.RECIPE, [f"train.steps={launching_page.STEPS}"]), 2)
    resolved.write(directory)
    assert run_warm(launchers.commands("local", directory, 2, "cpu")) == [0, 0]
    return launching_page.losses(RunDir(directory).metrics)


@pytest.fixture
def train(recipe_mapping: dict[str, Any], tmp_path: Path) -> Trainer:
    """`train(*overrides, nproc=2)`: a real run in real processes."""
    count = iter(range(1000))

    def run(
        *overrides: str, nproc: int = 2, check: bool = True, into: Path | None = None, enter: Enter | None = None
    ) -> Finished:
        resolved = resolve(make_recipe(recipe_mapping, overrides), nproc)
        directory = resolved.write(into or tmp_path / f"run-{next(count)}")
        codes = run_warm(launchers.commands("local", directory.path, nproc, "cpu"), enter)
        if check and any(codes):
            logs = "\n".join(path.read_text() for path in sorted(directory.path.glob("logs/*")))
            raise AssertionError(f"exit codes {codes}\n{logs[-4000:]}")
        return Finished(directory, codes)

    return run


@pytest.fixture
def warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that a test calls start warm workers: for tests that are not about how a worker starts."""
    monkeypatch.setattr(supervise, "run_all", functools.partial(supervise.run_all, start=WarmProcess.start))
