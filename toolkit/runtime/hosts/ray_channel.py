"""Channel to a node's agent through Ray: an actor in the node's bundle holds the agent's pipes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from toolkit.runtime.hosts.agent import AGENT, ROOT

ANSWER_SECONDS = 10.0
"""Time for the actor to write a line."""
CALLS = 8
"""Methods of the actor that run concurrently: two readers, writers, the wait for its end."""


class RayChannel:
    """One actor with all devices of its node's bundle: Ray makes them visible to it, and so to the workers."""

    def __init__(self, group: PlacementGroup, index: int, resource: str, devices: int) -> None:
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, _OPTIONS[resource]: devices}
        actor: Any = ray.remote(AgentProcess)
        self._actor = actor.options(max_concurrency=CALLS, scheduling_strategy=place, **options).remote(ROOT, AGENT)
        self._end = "its agent has ended"

    def address(self, seconds: float) -> str:
        """Address at which other nodes reach this one; `RayError` if its actor does not start."""
        return str(ray.get(self._actor.address.remote(), timeout=seconds))

    def write(self, line: str) -> None:
        """Write to the agent. The environment travels this way too, so it appears in no log, file or command line."""
        try:
            ray.get(self._actor.write.remote(line), timeout=ANSWER_SECONDS)
        except RayError as error:
            raise OSError(reason(error)) from None

    def output(self) -> Iterator[str]:
        """Lines of the agent's standard output."""
        return self._lines("stdout")

    def complaints(self) -> Iterator[str]:
        """Lines that the agent and the workers write to standard error."""
        return self._lines("stderr")

    def hang_up(self) -> None:
        """Close the agent's standard input."""
        with contextlib.suppress(RayError):
            ray.get(self._actor.hang_up.remote(), timeout=ANSWER_SECONDS)

    def leave(self, seconds: float) -> None:
        """Wait for the agent to end, then end its actor."""
        with contextlib.suppress(RayError):
            ray.get(self._actor.wait.remote(), timeout=seconds)
        ray.kill(self._actor)

    def end(self) -> str:
        """Why the channel is closed."""
        return self._end

    def _lines(self, stream: str) -> Iterator[str]:
        try:
            while line := ray.get(self._actor.read.remote(stream)):
                yield line
        except RayError as error:
            self._end = reason(error)


_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus"}


def reason(error: BaseException) -> str:
    """The informative sentence of a Ray error; Ray puts identifiers before it and guesses after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    sentences = [line for line in lines if line.startswith("The actor")] or lines or [type(error).__name__]
    return sentences[-1].partition(". ")[0].rstrip(".")


class AgentProcess:
    """Actor with one node's agent as a child process; its methods are called from several threads."""

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
        """Address at which other nodes reach this one."""
        import ray

        return str(ray.util.get_node_ip_address())

    def write(self, line: str) -> None:
        """Write to the agent's standard input."""
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def read(self, stream: str) -> str:
        """The next line of `stdout` or `stderr`; empty at the end."""
        return str(getattr(self._process, stream).readline())

    def hang_up(self) -> None:
        """Close the agent's standard input; it then ends."""
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.close()

    def wait(self) -> int:
        """Wait until the agent has ended; return its exit code."""
        return self._process.wait()
