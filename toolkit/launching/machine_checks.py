"""Checks of this machine: what is wrong, and how to fix it. Quick ones run before every training."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.plans.deepspeed_rules import parse_version
from toolkit.units import GB


@dataclass(frozen=True)
class Finding:
    """One result of one check."""

    check: str
    level: Literal["ok", "warning", "error"]
    what: str
    fix: str = ""


@dataclass(frozen=True)
class CheckContext:
    """What is looked at."""

    output: Path
    """Where run directories go."""
    env: Mapping[str, str]
    hosts: tuple[str, ...] = ()
    """Other hosts of the job."""


FLOORS = {
    "torch": ("2.10", "older versions run code from weight files (CVE-2025-32434, CVE-2026-24747)"),
    "transformers": ("5.3", "older versions run remote code in spite of trust_remote_code=False (CVE-2026-4372)"),
    "deepspeed": ("0.19.4", "older versions are inexact where tensor shards meet ZeRO"),
}


def versions(site: CheckContext) -> Iterator[Finding]:
    """Installed versions against known defects."""
    for package, (floor, why) in FLOORS.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("versions", "error", f"{package} is not installed", f"pip install '{package}>={floor}'")
            continue
        if parse_version(version) < parse_version(floor):
            yield Finding("versions", "error", f"{package} {version}: {why}", f"pip install '{package}>={floor}'")
        else:
            yield Finding("versions", "ok", f"{package} {version}")


def stale_locks(site: CheckContext) -> Iterator[Finding]:
    """Lock files of interrupted kernel builds: every later build waits for them for ever, without a word."""
    root = Path(site.env.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    locks = [lock for lock in root.glob("**/lock") if time.time() - lock.stat().st_mtime > 600]
    for lock in locks:
        yield Finding("build locks", "error", f"{lock} is left from a build that was interrupted", f"rm {lock}")
    if not locks:
        yield Finding("build locks", "ok", "none is stale")


def shared_memory(site: CheckContext) -> Iterator[Finding]:
    """Collectives and data loaders of one host go through it."""
    path = Path("/dev/shm")  # noqa: S108 - looked at, not written to
    if not path.is_dir():
        yield Finding("shared memory", "warning", "is not mounted", "mount a tmpfs there")
        return
    free = shutil.disk_usage(path).free
    level: Literal["ok", "warning"] = "ok" if free > GB else "warning"
    fix = "" if level == "ok" else "remount it larger (docker: --shm-size=16g), or remove old files"
    yield Finding("shared memory", level, f"{free / GB:.1f} GB free", fix)


def limits(site: CheckContext) -> Iterator[Finding]:
    """Limits of the process that training meets."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    few = files != resource.RLIM_INFINITY and files < 1024
    fix = "ulimit -n 65536 (limits.conf: nofile)" if few else ""
    yield Finding("limits", "warning" if few else "ok", f"{files} open files", fix)
    if locked != resource.RLIM_INFINITY and locked < 64 * 2**10:
        yield Finding("limits", "warning", f"{locked} bytes of locked memory", "ulimit -l unlimited: RDMA needs it")


def ports(site: CheckContext) -> Iterator[Finding]:
    """Ranks meet at a TCP port, over an interface that other hosts can reach."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            number = probe.getsockname()[1]
        yield Finding("ports", "ok", f"port {number} could be taken")
    except OSError as error:
        yield Finding("ports", "error", f"no port can be taken: {error.strerror}", "check firewall and net namespaces")
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        fix = f"add '127.0.0.1 {socket.gethostname()}' to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        yield Finding("ports", "warning", "this host's own name does not resolve", fix)


def hosts(site: CheckContext) -> Iterator[Finding]:
    """Every host of the hostfile answers on its SSH port."""
    for host in site.hosts:
        try:
            with socket.create_connection((host, 22), timeout=3):
                yield Finding("hosts", "ok", f"{host} answers")
        except OSError as error:
            fix = "check the name, the network and sshd; `ssh HOST true` must work without a password"
            yield Finding("hosts", "error", f"{host} does not answer on port 22: {error}", fix)


def devices(site: CheckContext) -> Iterator[Finding]:
    """Accelerators that exist against those that are visible."""
    present = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    visible = site.env.get("CUDA_VISIBLE_DEVICES")
    if not present:
        yield Finding("devices", "ok", "no NVIDIA device; training runs on the CPU")
    elif visible is not None and len([v for v in visible.split(",") if v]) < len(present):
        what = f"{len(present)} NVIDIA devices, CUDA_VISIBLE_DEVICES shows {visible or 'none'}"
        yield Finding("devices", "warning", what, "unset CUDA_VISIBLE_DEVICES to use all of them")
    else:
        yield Finding("devices", "ok", f"{len(present)} NVIDIA devices")


def disk(site: CheckContext) -> Iterator[Finding]:
    """Space where runs and checkpoints go."""
    place = next(path for path in (site.output.resolve(), *site.output.resolve().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK):
        yield Finding("disk", "error", f"{place} can't be written to", "choose another `output`, or change its owner")
    elif free < GB:
        yield Finding("disk", "warning", f"{free / GB:.2f} GB free in {place}", "free some space, or change `output`")
    else:
        yield Finding("disk", "ok", f"{free / GB:.0f} GB free in {place}")


def write_speed(site: CheckContext) -> Iterator[Finding]:
    """How fast a checkpoint can be written and synced there."""
    place = next(path for path in (site.output.resolve(), *site.output.resolve().parents) if path.exists())
    block, count = os.urandom(1 << 22), 16
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            started = time.perf_counter()
            for _ in range(count):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            rate = count * len(block) / (time.perf_counter() - started) / GB
    except OSError as error:
        yield Finding("write speed", "error", f"{place}: {error.strerror}", "choose another `output`")
        return
    slow = rate < 0.1
    fix = "checkpoint.asynchronous: true writes while training goes on; a local disk may be faster" if slow else ""
    yield Finding("write speed", "warning" if slow else "ok", f"{rate:.2f} GB/s in {place}", fix)


def wandb_login(site: CheckContext) -> Iterator[Finding]:
    """Whether runs can be recorded online."""
    if site.env.get("WANDB_API_KEY") or "api.wandb.ai" in _netrc():
        yield Finding("W&B", "ok", "a key is there")
    else:
        yield Finding("W&B", "ok", "no key: runs are recorded offline; `wandb login` changes that")


def _netrc() -> str:
    try:
        return (Path.home() / ".netrc").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


Check = Callable[[CheckContext], Iterator[Finding]]
QUICK: tuple[Check, ...] = (versions, stale_locks, shared_memory, limits, ports, devices, disk)
"""What `toolkit train` runs first: milliseconds."""
ALL: tuple[Check, ...] = (*QUICK, hosts, write_speed, wandb_login)


def examine(site: CheckContext, checks: tuple[Check, ...] = ALL) -> list[Finding]:
    """Every finding of these checks."""
    return [finding for check in checks for finding in check(site)]
