"""A stop signal ends a run with 75 at any moment of its life; planted heartbeats get no bystander signalled."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.disturbances import memory_group
from benchmarks.harness.hosts import why_not
from benchmarks.signals import leftovers, start, wait_for_fork, write_recipe
from toolkit.errors import Preempted, RankFailed
from toolkit.launching import stop_signals
from toolkit.launching.launchers import Command
from toolkit.run_dir import heartbeat
from toolkit.run_dir.heartbeat import Beat
from toolkit.run_dir.layout import RunDir
from toolkit.runtime.supervision.supervise import OwnWorkers, run_all

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def hangup_counts() -> Iterator[None]:
    """Under nohup, SIGHUP is ignored, by children too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGTERM, 0.0), (signal.SIGHUP, 0.3), (signal.SIGTERM, 2.5)])
def test_start_up_is_stopped_with_75_and_not_restarted(tmp_path: Path, number: signal.Signals, seconds: float) -> None:
    run = tmp_path / "run"
    process = start(write_recipe(tmp_path), run)
    wait_for_fork(process)
    time.sleep(seconds)
    process.send_signal(number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 75, text
    assert "asked to stop" in text
    assert "restarting" not in text
    assert leftovers(run) == []


def test_a_signal_before_the_workers_start_ends_the_command() -> None:
    with pytest.raises(Preempted, match="SIGHUP"), stop_signals.ending_the_command():
        os.kill(os.getpid(), signal.SIGHUP)


def test_a_signal_while_a_finished_command_ends_changes_nothing() -> None:
    """Handlers of before, which end the process, must not come back once signals are ignored."""
    with stop_signals.ending_the_command():
        stop_signals.ignore()
    try:
        assert {signal.getsignal(number) for number in stop_signals.SIGNALS} == {signal.SIG_IGN}
    finally:
        for number in stop_signals.SIGNALS:
            signal.signal(number, signal.SIG_DFL)
    with stop_signals.ending_the_command():
        pass
    assert {signal.getsignal(number) for number in stop_signals.SIGNALS} == {signal.SIG_DFL}


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals.ending_the_command():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


BEGINS_TO_TRAIN = """
import signal, sys, time
from pathlib import Path
from toolkit.run_dir import heartbeat
from toolkit.run_dir.heartbeat import Beat
import os, socket
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
directory, supervisor = Path(sys.argv[1]), os.getppid()
beat = lambda **more: Beat(rank=0, host=socket.gethostname(), pid=os.getpid(), time=time.time(), **more)
if sys.argv[2] == "known":
    heartbeat.write(directory, beat(phase="starting"))
time.sleep(0.5)
os.kill(supervisor, signal.SIGTERM)
time.sleep(0.6)
heartbeat.write(directory, beat(phase="training", step=7))
deadline = time.monotonic() + 30
while not asked and time.monotonic() < deadline:
    time.sleep(0.01)
heartbeat.write(directory, heartbeat.ended(beat(phase="saving", step=7), 75, "", time.time()))
sys.exit(75 if asked else 1)
"""
"""A worker whose first steps are done when the request to stop arrives, but not yet in its heartbeat."""


@pytest.mark.parametrize("heartbeat_at_first", ["known", "unknown"])
def test_a_request_just_before_the_first_heartbeat_of_training_is_saved(
    tmp_path: Path, heartbeat_at_first: str
) -> None:
    run = RunDir(tmp_path)
    run.heartbeats.mkdir()
    argv = (sys.executable, "-c", BEGINS_TO_TRAIN, str(run.heartbeats), heartbeat_at_first)
    assert run_all([Command(argv=argv, rank=0)], run, forget=False) == Preempted.exit_code
    assert heartbeat.read_all(run.heartbeats)[0].exit_code == Preempted.exit_code, "it was killed instead of asked"


SUPERVISES = """
import sys
from pathlib import Path
from toolkit.errors import RankFailed
from toolkit.launching.launchers import Command
from toolkit.run_dir.layout import RunDir
from toolkit.runtime.supervision.supervise import OwnWorkers, run_all
run = RunDir(Path(sys.argv[1]))
run.heartbeats.mkdir()
hungry = "held = []\\nwhile True: held.append(bytearray(1 << 20))"
try:
    run_all([Command(argv=(sys.executable, "-c", hungry), rank=0)], run)
except RankFailed as error:
    print(error)
"""


@pytest.mark.skipif(bool(why_not()), reason="only root can make a control group")
def test_a_limit_of_the_control_group_is_named_when_the_kernel_kills_a_rank(tmp_path: Path) -> None:
    with memory_group() as group:
        (group.path / group.limit).write_text(str(256 << 20))
        command = [*group.prefix, sys.executable, "-c", SUPERVISES, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    text = " ".join(done.stdout.split())
    assert "rank 0 on" in text, done.stdout + done.stderr
    assert "was ended by SIGKILL" in text
    assert "the OOM killer killed 1 process" in text
    assert "memory limit of its control group (container or job): 0.25 GiB" in text


@pytest.mark.parametrize("hangs", [False, True])
def test_a_planted_heartbeat_gets_no_bystander_signalled(tmp_path: Path, hangs: bool) -> None:
    run = RunDir(tmp_path)
    run.heartbeats.mkdir()
    bystander = subprocess.Popen(["bash", "-c", "exec -a toolkit.worker sleep 60"], start_new_session=True)
    try:
        beat = Beat(rank=0, host=socket.gethostname(), pid=bystander.pid, time=time.time(), step=3, phase="training")
        heartbeat.write(run.heartbeats, beat)
        own = Command(argv=(sys.executable, "-c", f"import time; time.sleep({60 if hangs else 1}); exit(1)"), rank=0)
        with pytest.raises(RankFailed):
            run_all([own], run, 1.0 if hangs else float("inf"), forget=False)
        assert bystander.poll() is None, "the bystander was killed"
    finally:
        bystander.kill()
        bystander.wait()


def test_a_clock_that_is_set_loses_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil derives the time at which a process began from the host's clock: it moves when the clock is set."""
    worker = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        own = OwnWorkers(RunDir(tmp_path))
        own.processes.append(worker)
        assert own.owns(worker.pid)
        began = psutil.Process.create_time
        monkeypatch.setattr(psutil.Process, "create_time", lambda process: began(process) + 2.8)
        assert own.owns(worker.pid)
    finally:
        worker.kill()
        worker.wait()
    assert not own.owns(worker.pid)
