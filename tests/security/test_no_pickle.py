"""Nothing is unpickled from a socket: neither in our sources nor in a run of any strategy."""

from __future__ import annotations

import pickle
import re
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Trainer
from toolkit.runtime.supervision.warm_pool import enter_worker

pytestmark = pytest.mark.slow

TOOLKIT = Path(__file__).parents[2] / "toolkit"
FORBIDDEN = re.compile(
    r"_object_list\(|gather_object\(|\bpickle\.loads?|Unpickler|torch\.load\(|"
    r"allow_pickle=True|\bdill\b|\bjoblib\b|\bmarshal\b|\bshelve\b"
)
ALLOWED = {
    ("runtime/supervision/warm_pool.py", "pickle.loads"),
    ("runtime/rehearsal/server.py", "pickle.loads"),
    ("sessions/rehearse.py", "pickle.loads"),
}
"""Answers of our own forked processes, in a temporary directory of this user alone."""


def test_the_sources_unpickle_nothing_from_others() -> None:
    found = {
        (str(path.relative_to(TOOLKIT)), match[0])
        for path in TOOLKIT.rglob("*.py")
        for match in FORBIDDEN.finditer(path.read_text())
    }
    assert found == ALLOWED


def records_unpickling(argv: tuple[str, ...], env: dict[str, str]) -> None:
    """A worker that writes down every caller that unpickles."""
    log = Path(argv[argv.index("--run-dir") + 1]) / f"unpickled-{env['RANK']}"
    log.touch()

    def note() -> None:
        frames = traceback.extract_stack()[-6:-2]
        with log.open("a") as file:
            file.write(" < ".join(f"{frame.filename}:{frame.name}" for frame in reversed(frames)) + "\n")

    def wrapped(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            note()
            return original(*args, **kwargs)

        return call

    class Recorded(pickle.Unpickler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            note()
            super().__init__(*args, **kwargs)

    import torch.distributed.distributed_c10d as c10d

    pickle.loads, pickle.load, pickle.Unpickler = wrapped(pickle.loads), wrapped(pickle.load), Recorded  # type: ignore[misc]
    c10d._unpickler = Recorded  # type: ignore[attr-defined]  # torch keeps the class under a name of its own
    enter_worker(argv, env)


RUNS = [
    "strategy={name: data_parallel}",
    "strategy={name: zero, zero_stage: 2}",
    "strategy={name: zero, zero_stage: 3}",
    "strategy={name: pipeline, pp: 2}",
    "strategy={name: tensor_parallel, tp: 2}",
    "strategy={name: tensor_parallel, tp: 2, zero_stage: 1, tensor_by: autotp}",
    "strategy={name: sequence_parallel, sp: 2}",
    "strategy={name: local_sgd, islands: 2, local_steps: 2}",
]


@pytest.mark.parametrize("strategy", RUNS)
def test_a_run_unpickles_nothing(train: Trainer, strategy: str) -> None:
    every = 0 if "autotp" in strategy else 2  # AutoTP's shards can't be saved
    finished = train(strategy, "train.steps=2", f"checkpoint.every={every}", enter=records_unpickling)
    assert [(finished.run.path / f"unpickled-{rank}").read_text() for rank in (0, 1)] == ["", ""]
