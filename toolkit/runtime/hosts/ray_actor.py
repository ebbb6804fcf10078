"""What runs in a Ray worker: the host agent as a child process, with its pipes as methods.

The class goes to the nodes by value: there it needs the standard library and Ray only, and what is missing of the
toolkit is told by the agent that can't start.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence


class AgentProcess:
    """One node's agent; methods are called at the same time, from several threads."""

    def __init__(self, root: str, words: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            ["env", f"PYTHONPATH={root}", sys.executable, *words],  # noqa: S607
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )

    def address(self) -> str:
        """Where other nodes reach this one."""
        import ray

        return str(ray.util.get_node_ip_address())

    def write(self, line: str) -> None:
        """To the agent."""
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def read(self, stream: str) -> str:
        """The next line of `stdout` or `stderr`; empty at the end."""
        return str(getattr(self._process, stream).readline())

    def hang_up(self) -> None:
        """The agent ends when nobody speaks to it."""
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.close()

    def wait(self) -> int:
        """Until the agent has ended; its exit code."""
        return self._process.wait()
