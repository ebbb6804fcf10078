"""Commands of the toolkit in processes that are forked from this one, which has imported everything.

They run the same modules as `__main__`, with workers of their own, and start in a tenth of a second instead of ten
seconds. What is left out is the start of the interpreter and its imports.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from toolkit.launching.environment import PARENT
from toolkit.launching.launchers import WORKER, Command
from toolkit.launching.stop_signals import SIGNALS
from toolkit.runtime.supervision import supervise

POLL_SECONDS = 0.01


@dataclass
class Forked:
    """A forked process, with the methods of `subprocess.Popen` that are needed here."""

    pid: int
    output: Path
    alive: int
    """Read end of a pipe whose other end every process of the command has: it ends with the last of them."""
    returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self) -> None:
        """Kill the process."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = float("inf")) -> None:
        """Wait until the process has ended."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(["forked"], timeout)
            time.sleep(POLL_SECONDS)

    def communicate(self, timeout: float = float("inf")) -> tuple[str, None]:
        """Wait, and return what the command said."""
        self.wait(timeout)
        return self.output.read_text(errors="replace"), None

    def leaves_processes(self) -> bool:
        """Whether a process of the command lives on; asked once, after its end."""
        ready, _, _ = select.select([self.alive], [], [], 0.5)  # the kernel may still be closing a killed one's files
        left = not (ready and os.read(self.alive, 1) == b"")
        os.close(self.alive)
        return left


def start(words: tuple[str, ...], output: Path) -> Forked:
    """Start a command; its output goes to a file."""
    alive, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(alive)
        supervise.run_all.__defaults__ = (float("inf"), lambda command: _start_worker(command, output))
        _become("toolkit.cli", words, output)
    os.close(held)
    return Forked(pid, output, alive)


def _start_worker(command: Command, output: Path) -> Forked:
    """`supervise.spawn`, forked."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.environ.update({**command.env, PARENT: str(parent)})
        _become(WORKER, command.argv[command.argv.index(WORKER) + 1 :], output)
    return Forked(pid, output, -1)


def _become(module: str, words: tuple[str, ...], output: Path) -> None:
    """Run a module as if Python had been started with it, and end this process."""
    code: object = 1
    try:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(file, stream)
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
