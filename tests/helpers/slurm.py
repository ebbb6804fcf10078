"""A real Slurm of one node on this machine: munge, controller and node daemon with everything in one directory."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.launching.environment import free_port

TOOLS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=5
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why Slurm can't run here; empty if it can."""
    if os.geteuid() != 0:
        return "the test's own Slurm is started by root"
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool, path=_path()) is None})
    return f"the test's own Slurm needs {', '.join(missing)}" if missing else ""


@dataclass
class Slurm:
    """While it is entered, `sbatch` and the like work with `env`."""

    root: Path
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Slurm:
        for name in ("munge", "state", "spool"):
            (self.root / name).mkdir(parents=True, mode=0o700)
        (self.root / "munge" / "key").write_bytes(os.urandom(128))
        (self.root / "munge" / "key").chmod(0o400)
        values = {"controller_port": free_port(), "node_port": free_port(), "cpus": os.cpu_count()}
        text = CONFIG.format(root=self.root, host=socket.gethostname(), **values)
        (self.root / "slurm.conf").write_text(text)
        (self.root / "cgroup.conf").write_text("CgroupAutomount=no\n")
        try:
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._started):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.root / "slurm.conf"), "PATH": _path()}

    def run(self, *argv: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            argv, env={**self.env, **(env or {})}, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows of a job."""
        words = self.run("scontrol", "show", "job", number, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, state: str, seconds: float = 240) -> dict[str, str]:
        """Until a job is in a state; it must not fail on the way."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            job = self.job(number)
            if job["JobState"] == state:
                return job
            assert job["JobState"] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"), job
            time.sleep(0.2)
        raise AssertionError(f"job {number} is not {state}: {self.job(number)}\n{self._logs()}")

    def _start_all(self) -> None:
        munge = self.root / "munge"
        options = [f"--{name}={munge / name.split('-')[0]}" for name in ("socket", "key-file", "pid-file", "seed-file")]
        self._start("munged", "--foreground", "--force", *options, f"--log-file={munge / 'log'}")
        self._until(lambda: (munge / "socket").exists())
        self._start("slurmctld", "-D", "-f", str(self.root / "slurm.conf"))
        self._start("slurmd", "-D", "-f", str(self.root / "slurm.conf"))
        self._until(lambda: "idle" in self._state())

    def _start(self, *argv: str) -> None:
        with (self.root / f"{argv[0]}.out").open("wb") as out:
            self._started.append(subprocess.Popen(argv, env=self.env, stdout=out, stderr=out, start_new_session=True))

    def _state(self) -> str:
        return subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], env=self.env, capture_output=True, text=True, timeout=30
        ).stdout

    def _until(self, done: object) -> None:
        assert callable(done)
        deadline = time.monotonic() + 60
        while not done():
            assert time.monotonic() < deadline, f"Slurm does not start\n{self._logs()}"
            time.sleep(0.2)

    def _logs(self) -> str:
        paths = [*self.root.glob("*.log"), *self.root.glob("*.out"), self.root / "munge" / "log"]
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in paths if path.exists())


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
