"""The agent that `toolkit train` starts on each host, through ssh or Ray: it starts and watches the host's workers.

Agent and controller exchange lines of JSON. Order, signals and pings arrive on standard input; greeting, heartbeats,
output and result leave on standard output. If the controller is silent or closes the connection, all workers are ended.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.clusters.reader import num_accelerators
from toolkit.errors import RankFailed, ToolkitError
from toolkit.launching import environment
from toolkit.launching.launchers import Command
from toolkit.launching.stop_signals import StopRequest
from toolkit.run_dir.layout import RunDir
from toolkit.runtime.supervision.supervise import run_all

ROOT = str(Path(__file__).resolve().parents[3])
"""Directory of this toolkit; it must be the same on every host."""
AGENT = ("-P", "-m", "toolkit.runtime.hosts.agent")
BEAT_SECONDS = 1.0
SILENCE_SECONDS = 15.0
"""Without a message for this long, the other side counts as lost."""
PACKAGES = ("torch", "deepspeed", "transformers")
BACKSTOP_SECONDS = 10.0


def main() -> int:
    """Greet, receive the order, run the host's workers; ends when the controller does."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray (2.40 and later) starts processes with SIGINT blocked
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stop = StopRequest()
    stop.listen()  # before the workers are there, too: an agent that a signal ends would count as a lost host
    controller = Controller()
    controller.send(hello=greeting())
    try:
        order = controller.order()
        if order is None:
            return 0
        reason = _refusal(order)
        if reason:
            controller.send(refused=reason)
            return 0
        controller.send(end=_run(order, stop))
    except KeyboardInterrupt:  # the controller is gone; `run_all` has ended the workers
        return RankFailed.exit_code
    finally:
        controller.flush()
    return 0


def greeting() -> dict[str, Any]:
    """What the controller needs to know about this host."""
    return {
        "host": socket.gethostname(),
        "address": environment.own_address(),
        "port": environment.free_port(),
        "python": ".".join(map(str, sys.version_info[:2])),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "accelerators": num_accelerators(),
    }


def fingerprint(run: RunDir) -> str:
    """Hash of a run directory's plan and recipe; equal on hosts that see the same directory."""
    try:
        return hashlib.sha256(run.plan.read_bytes() + run.recipe.read_bytes()).hexdigest()
    except OSError as error:
        return f"{error.strerror}"


def _refusal(order: Mapping[str, Any]) -> str:
    run = RunDir(Path(order["run_dir"]))
    if fingerprint(run) == order["fingerprint"]:
        return ""
    return f"does not see the run directory {run.path}; `output` must be on a filesystem that all hosts share"


def _run(order: Mapping[str, Any], stop: StopRequest) -> dict[str, Any]:
    """Run the workers and return how they ended."""
    os.chdir(order["directory"])
    own = [
        Command(argv=tuple(c["argv"]), env={**order["env"], **c["env"]}, rank=c["rank"], imports_cwd=c["imports_cwd"])
        for c in order["commands"]
    ]
    try:
        run = RunDir(Path(order["run_dir"]))
        code = run_all(own, run, order["hang_timeout_seconds"], forget=False, stop=stop)
    except ToolkitError as error:
        return {"code": error.exit_code, "text": str(error), "kind": type(error).__name__}
    return {"code": code, "text": "", "kind": ""}


class Controller:
    """The agent's connection to the controller over standard input and output."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._lock = threading.Lock()
        self._heard = time.monotonic()
        self._orders: list[dict[str, Any]] = []
        self._ordered = threading.Event()
        reading, writing = os.pipe()
        os.dup2(writing, 1)  # output of the workers becomes messages
        os.close(writing)
        self._relay = threading.Thread(target=self._forward, args=(reading,), daemon=True)
        for thread in (self._relay, threading.Thread(target=self._listen, daemon=True)):
            thread.start()
        threading.Thread(target=self._beat, daemon=True).start()

    def send(self, **message: Any) -> None:
        """Send one message."""
        try:
            with self._lock:
                self._out.write(json.dumps(message) + "\n")
                self._out.flush()
        except OSError:
            self._give_up()

    def order(self) -> dict[str, Any] | None:
        """The order; None if the controller closes the connection first."""
        self._ordered.wait()
        return self._orders[0] if self._orders else None

    def flush(self) -> None:
        """Send the remaining output."""
        os.close(1)
        self._relay.join(timeout=BEAT_SECONDS)

    def _listen(self) -> None:
        for line in sys.stdin:
            self._heard = time.monotonic()
            message = json.loads(line)
            if "order" in message:
                self._orders.append(message["order"])
                self._ordered.set()
            elif "signal" in message:  # `run_all` forwards it to the workers
                os.kill(os.getpid(), message["signal"])
        self._give_up()

    def _beat(self) -> None:
        while time.monotonic() - self._heard < SILENCE_SECONDS:
            self.send(beat=True)
            time.sleep(BEAT_SECONDS)
        self._give_up()

    def _forward(self, reading: int) -> None:
        while text := os.read(reading, 1 << 16):
            self.send(out=text.decode("utf-8", "replace"))

    def _give_up(self) -> None:
        """End the run: interrupt the main thread, then the process. Workers notice when their parent ends."""
        self._ordered.set()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(BACKSTOP_SECONDS)
        os._exit(RankFailed.exit_code)


if __name__ == "__main__":
    sys.exit(main())
