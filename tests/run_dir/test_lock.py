"""Two runs never share a run directory; what a dead run left is recognised."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit import cli
from toolkit.errors import BadInput
from toolkit.run_dir.layout import LOCK
from toolkit.run_dir.lock import SILENT_SECONDS, Holder, _take, hold, start_time


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def plant(path: Path, **fields: Any) -> None:
    path.mkdir(exist_ok=True)
    (path / LOCK).write_text(json.dumps(fields))


def lock_of(pid: int) -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": pid, "started": start_time(pid)}


@pytest.mark.parametrize("command", ["train", "resume"])
def test_a_second_run_is_refused_and_told_of_the_first(
    recipe_mapping: dict[str, Any],
    tmp_path: Path,
    sleeper: subprocess.Popen[bytes],
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    run.mkdir()
    for path in (recipe, run / "recipe.yaml"):
        path.write_text(yaml.safe_dump(recipe_mapping))
    plant(run, **lock_of(sleeper.pid))
    before = {path: path.read_bytes() for path in run.iterdir()}
    words = [str(recipe), "--run-dir", str(run)] if command == "train" else [str(run)]
    assert cli.main([command, *words, "--nproc", "1"]) == 2
    message = f"{run} is in use by the run of process {sleeper.pid} on {socket.gethostname()}"
    assert message in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_the_lock_is_there_while_held_and_gone_afterwards(tmp_path: Path) -> None:
    with hold(tmp_path / "run", print):
        assert json.loads((tmp_path / "run" / LOCK).read_text()) == lock_of(os.getpid())
        with pytest.raises(BadInput, match="in use"), hold(tmp_path / "run", print):
            pass
    assert not (tmp_path / "run").exists(), "nothing was written"


def test_stale_locks_are_replaced_with_a_line(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    planted = lock_of(gone.pid)
    gone.wait()
    another_start = {**lock_of(sleeper.pid), "started": "an earlier boot:17"}
    for number, fields in enumerate([planted, another_start, {"pid": "x"}, {**planted, "pid": 10**30}]):
        said: list[str] = []
        plant(tmp_path / str(number), **fields)
        with hold(tmp_path / str(number), said.append):
            assert json.loads((tmp_path / str(number) / LOCK).read_text()) == lock_of(os.getpid())
        assert len(said) == 1
        assert "stale lock" in said[0]


def test_another_host_is_believed_while_its_heartbeats_are_new(tmp_path: Path) -> None:
    plant(tmp_path, host="elsewhere", pid=1, started="x")
    old = time.time() - 2 * SILENT_SECONDS
    os.utime(tmp_path / LOCK, (old, old))
    beats = tmp_path / "heartbeats"
    beats.mkdir()
    (beats / "rank-0.json").touch()
    with pytest.raises(BadInput, match="on elsewhere"), hold(tmp_path, print):
        pass
    os.utime(beats / "rank-0.json", (old, old))
    with hold(tmp_path, print):
        pass


def test_of_runs_that_start_at_once_one_gets_the_lock(tmp_path: Path) -> None:
    """A lock must never be seen without its contents: it would be taken for one that can't be read, and replaced."""
    for number in range(100):
        path, together, got = tmp_path / str(number), threading.Barrier(4), []
        path.mkdir()
        threads = [threading.Thread(target=take, args=(path, together, got)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1, f"round {number}: {len(got)} runs hold the lock"
        assert [each.name for each in path.iterdir()] == [LOCK]


def take(path: Path, together: threading.Barrier, got: list[int]) -> None:
    mine = Holder(socket.gethostname(), os.getpid(), start_time(os.getpid()))
    together.wait()
    with contextlib.suppress(BadInput):
        _take(path / LOCK, mine, print)
        got.append(1)
