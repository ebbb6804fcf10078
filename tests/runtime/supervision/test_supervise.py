"""Ranks that die, hang, are asked to stop or compute no numbers: named, ended, saved. Real processes."""

from __future__ import annotations

import faulthandler
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.self_killing import kill_point, poison, poison_stage, scale_losses, suicidal
from benchmarks.harness.supervised import Disturb, Outcome, assert_whole_and_recent, at_step, send, supervised
from toolkit.checkpoints import store
from toolkit.run_dir import heartbeat
from toolkit.run_dir.heartbeat import Beat
from toolkit.run_dir.layout import RunDir, check
from toolkit.runtime.distributed.process_group import all_reduce_wait, send_wait
from toolkit.runtime.supervision.heartbeat_thread import HeartbeatThread
from toolkit.runtime.supervision.supervise import collective_of
from toolkit.runtime.supervision.warm_pool import enter_worker
from toolkit.worker import Rank

pytestmark = pytest.mark.slow

Watched = Callable[..., Outcome]


@pytest.fixture
def watched(recipe_mapping: dict[str, Any], tmp_path: Path) -> Watched:
    """`watched(disturb, *overrides, into="run")`: a supervised run of warm workers, disturbed from a thread."""

    def go(disturb: Disturb | None, *overrides: str, into: str = "run", **options: Any) -> Outcome:
        return supervised(recipe_mapping, tmp_path / into, disturb, *overrides, **options)

    return go


LONG = ("train.steps=100000", "strategy.name=zero", "strategy.zero_stage=2")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named(watched: Watched, rank: int) -> None:
    done = watched(send(rank, signal.SIGKILL, step=2), *LONG)
    assert done.code == 4
    assert f"rank {rank} on {os.uname().nodename} was ended by SIGKILL at step" in done.message
    assert "memory of the host:" in done.message
    assert str(done.run.log(rank)) in done.message
    assert done.seconds < 5


def fail_on_rank_1(argv: tuple[str, ...], env: dict[str, str]) -> None:
    from toolkit.runtime import between_steps

    original = between_steps.CheckpointHook.after

    def after(self: Any, step: Any) -> None:
        if step.number == 3 and env["RANK"] == "1":
            raise ZeroDivisionError("planted")
        original(self, step)

    between_steps.CheckpointHook.after = after  # type: ignore[method-assign]
    enter_worker(argv, env)


def test_an_exception_is_named_with_its_last_words(watched: Watched) -> None:
    done = watched(None, *LONG, enter=fail_on_rank_1)
    assert done.code == 4
    assert done.message.startswith(f"rank 1 on {os.uname().nodename} failed: ZeroDivisionError: planted at step")
    assert "  | ZeroDivisionError: planted" in done.message


def test_a_stopped_rank_is_named_with_the_collective(watched: Watched) -> None:
    done = watched(send(1, signal.SIGSTOP, step=2), *LONG, "train.hang_timeout_seconds=6")
    assert done.code == 4
    assert "rank 1 on" in done.message
    assert "is stopped at step" in done.message
    assert re.search(r"the other ranks wait for it in (all_|reduce)", done.message)
    assert done.seconds < 6 + 2 + 1
    for rank in (0, 1):
        assert "most recent call first" in done.run.log(rank).read_text()


class Dumping:
    """A collective under way: waiting for it dumps the stack into a file, as a hang does."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def wait(self) -> None:
        with self.log.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=False)


@pytest.mark.parametrize(("wait", "name"), [(all_reduce_wait, "all_reduce"), (send_wait, "send")])
def test_a_collective_is_recognised_where_it_is_waited_for(
    wait: Callable[[Any], None], name: str, tmp_path: Path
) -> None:
    """`Work.wait` is native code: without a Python function around it, no stack shows it."""
    wait(Dumping(tmp_path / "stack"))
    assert collective_of((tmp_path / "stack").read_text()) == name


def stop_in_the_first_step(argv: tuple[str, ...], env: dict[str, str]) -> None:
    if env["RANK"] == "1":
        scale_losses(lambda count: os.kill(os.getpid(), signal.SIGSTOP) or 1.0)
    enter_worker(argv, env)


def test_a_rank_stopped_in_the_first_step_is_named_in_time(watched: Watched) -> None:
    """The first step may take long, but a process that lives beats all the while."""
    done = watched(None, *LONG, "train.hang_timeout_seconds=6", enter=stop_in_the_first_step)
    assert done.code == 4
    assert "rank 1 on" in done.message
    assert "is stopped at step 0" in done.message


def sleep_on_rank_0(argv: tuple[str, ...], env: dict[str, str]) -> None:
    from toolkit.runtime import between_steps

    original = between_steps.CheckpointHook.after

    def after(self: Any, step: Any) -> None:
        while step.number == 2 and env["RANK"] == "0":
            time.sleep(0.1)
        original(self, step)

    between_steps.CheckpointHook.after = after  # type: ignore[method-assign]
    enter_worker(argv, env)


def test_a_rank_that_never_comes_back_is_named(watched: Watched) -> None:
    done = watched(None, *LONG, "train.hang_timeout_seconds=6", enter=sleep_on_rank_0)
    assert "rank 0 on" in done.message
    assert "hangs at step" in done.message
    assert "in after" in done.message
    assert "rank 1 on" not in done.message


@pytest.mark.parametrize("first_step", [False, True])
def test_a_bare_worker_ends_a_hang_by_itself(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, first_step: bool
) -> None:
    """Without our supervisor: the ranks that wait dump their stacks, say who is silent, and exit."""
    monkeypatch.setattr("toolkit.runtime.supervision.supervise._hang", lambda *_: time.sleep(14) or "")
    disturb, enter = (None, stop_in_the_first_step) if first_step else (send(1, signal.SIGSTOP, step=2), None)
    done = watched(disturb, *LONG, "train.hang_timeout_seconds=4", enter=enter)
    assert heartbeat.read_all(done.run.heartbeats)[0].exit_code == 4
    assert "no progress for" in heartbeat.read_all(done.run.heartbeats)[0].error


@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGTERM, "first step"), (signal.SIGTERM, "step"), (signal.SIGTERM, "save"), (signal.SIGUSR1, "step")],
)
def test_a_stop_request_is_saved_and_resumable(watched: Watched, number: signal.Signals, moment: str) -> None:
    axes = ("strategy.name=zero", "strategy.zero_stage=1", "train.steps=100000", "checkpoint.every=3")

    def ask(run: RunDir) -> None:
        at_step(run, {"first step": 0, "step": 4, "save": 1}[moment])
        while moment == "save" and not list(run.checkpoints.glob(".writing*")):
            time.sleep(0.0005)
        os.kill(os.getpid(), number)  # as a scheduler sends it: to the supervisor

    done = watched(ask, *axes)
    assert done.code == 75
    step = store.steps(done.run.checkpoints)[0]
    assert max(done.losses) == step
    assert check(store.path_of(done.run.checkpoints, step)) == []
    again = watched(None, *axes, f"train.steps={step + 2}")
    assert (again.code, sorted(again.losses)) == (0, list(range(1, step + 3)))


@pytest.mark.parametrize(("stage", "precision"), [*((stage, "fp32") for stage in range(4)), (0, "bf16"), (1, "bf16")])
def test_no_update_is_made_of_what_is_no_number(watched: Watched, stage: int, precision: str) -> None:
    name = "zero" if stage else "data_parallel"
    axes = (f"strategy.name={name}", f"strategy.zero_stage={stage}", "strategy.micro_batch=4")
    done = watched(None, *axes, "train.steps=9", "checkpoint.every=1", f"model.precision={precision}", enter=poison)
    assert done.code == 5
    assert store.steps(done.run.checkpoints)[0] == 2, "the state before the bad step"
    log = done.run.log(0).read_text()
    assert "at step 3, from rank 1 (samples" in log
    assert "the update was skipped" in log


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_stage_that_makes_no_numbers_is_named(watched: Watched, culprit: int, way: str) -> None:
    """The others get what it made, and are not at fault."""
    axes = ("strategy.name=pipeline", "strategy.pp=2", "strategy.micro_batch=4")
    env = {"CULPRIT": f"{culprit}:{way}"}
    done = watched(None, *axes, "train.steps=9", "checkpoint.every=1", enter=poison_stage, env=env)
    assert done.code == 5
    assert store.steps(done.run.checkpoints)[0] == 2, "the state before the bad step"
    log = done.run.log(0).read_text()
    assert f"at step 3, from rank {culprit} (samples" in log
    assert f"rank {1 - culprit} (" not in log


def test_twenty_kills_lose_nothing(watched: Watched) -> None:
    """Half of them inside a save. After each, what is there is whole, and the end is that of an undisturbed run."""
    rng = random.Random(0)
    steps, every = 90, 2
    axes = ("strategy.name=zero", "strategy.zero_stage=2", f"train.steps={steps}", f"checkpoint.every={every}")
    undisturbed = watched(None, *axes, into="undisturbed")
    inside = 0
    for number in range(20):
        point = kill_point(rng, in_save=number % 2 == 0)
        done = watched(None, *axes, into="killed", enter=suicidal, env={"KILL": point})
        assert done.code == 4
        inside += bool(list(done.run.checkpoints.glob(".writing*")))
        assert_whole_and_recent(done, every)
    done = watched(None, *axes, into="killed")
    assert done.code == 0
    assert inside >= 5
    assert done.losses == undisturbed.losses


ORPHAN = """
import os, sys, time
from pathlib import Path
from toolkit.runtime.supervision.heartbeat_thread import HeartbeatThread
reading, writing = os.pipe()
os.close(reading)
HeartbeatThread(Path(sys.argv[1]), 0, os.fdopen(writing, "w"), parent=1 + os.getppid()).start()
time.sleep(60)
"""


def test_a_worker_ends_with_the_process_that_started_it_and_read_its_output(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN, str(tmp_path)], capture_output=True, text=True, timeout=50)
    assert done.returncode == 4, done.stderr
    assert heartbeat.read_all(tmp_path)[0].error == "the process that started it is gone"


def test_a_clock_that_is_set_is_no_silence(tmp_path: Path) -> None:
    """The other rank's clock is hours behind; it counts as silent only while its heartbeat stays the same."""
    pulse = HeartbeatThread(tmp_path, 0, sys.stderr)
    pulse.watch(1.0)
    first = Beat(rank=1, host="elsewhere", pid=1, time=time.time() - 9000)
    looks = []
    for beat in (first, replace(first, time=first.time + 5), replace(first, time=first.time + 5)):
        heartbeat.write(tmp_path, beat)
        pulse._looked = -1e9
        looks.append(pulse._one_is_silent())
    assert looks == [False, False, True]


def test_a_rank_that_can_not_write_its_end_says_it_on_the_terminal(tmp_path: Path) -> None:
    """As on a full disk: neither the log nor the heartbeat takes the message."""
    terminal = io.StringIO()
    rank = Rank(3, parent=None)
    rank.terminal.err = terminal
    rank.pulse = HeartbeatThread(tmp_path / "beats", 3, terminal)
    rank.pulse.start()
    shutil.rmtree(tmp_path / "beats")
    assert rank.end(4, "OSError: No space left on device") == 4
    assert terminal.getvalue() == "rank 3 failed: OSError: No space left on device\n"


def test_a_full_disk_does_not_change_the_exit_code() -> None:
    """Python exits with 120 if it can't flush its output."""
    code = (
        "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); print('lost'); "
        "from toolkit.worker import leave; leave(7)"
    )
    env = {**os.environ, "PYTHONUNBUFFERED": ""}  # else nothing is left to flush
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 7
