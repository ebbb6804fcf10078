"""Checks of this machine: what is wrong and how to fix it. The quick ones run before every training."""

from __future__ import annotations

import contextlib
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

from toolkit.launching.environment import ONEDNN_ISA, broken_tiles, has_wandb_key, read_cpuinfo
from toolkit.launching.launchers import import_path
from toolkit.launching.private_network import private_network
from toolkit.plans.versions import parse_version
from toolkit.units import GB, KIB

FULL_BYTES = 64 * KIB
"""A file system with less than this free counts as full."""


@dataclass(frozen=True)
class Finding:
    """One result of a check."""

    check: str
    level: Literal["ok", "warning", "error"]
    what: str
    fix: str = ""


@dataclass(frozen=True)
class CheckContext:
    """What the checks examine."""

    output: Path
    """Directory of run directories."""
    env: Mapping[str, str]
    hosts: tuple[str, ...] = ()
    """Other hosts of the job, by name."""


FLOORS = {
    "torch": ("2.10", "older versions execute code from weight files (CVE-2025-32434, CVE-2026-24747)"),
    "transformers": ("5.3", "older versions execute remote code despite trust_remote_code=False (CVE-2026-4372)"),
    "deepspeed": (
        "0.19.4",
        "older versions are not exact for tensor parallelism with ZeRO, or execute code (CVE-2024-43497, below 0.15.1)",
    ),
}

"""Lowest versions of what every run needs."""
KNOWN_HOLES = {
    "pyyaml": ("5.4", "older versions execute code from YAML files (CVE-2020-14343)"),
    "pyarrow": ("14.0.1", "older versions execute code from Parquet and IPC files (CVE-2023-47248)"),
    "pillow": ("10.3.0", "older versions overflow a buffer on crafted images (CVE-2024-28219)"),
    "requests": ("2.32.4", "older versions send .netrc passwords to other hosts (CVE-2024-47081)"),
    "urllib3": ("2.5.0", "older versions follow redirects that were turned off (CVE-2025-50181)"),
    "jinja2": ("3.1.6", "older versions let chat templates leave the sandbox (CVE-2025-27516)"),
    "protobuf": ("4.25.8", "older versions crash on nested messages (CVE-2025-4565)"),
    "tornado": ("6.5", "older versions can be blocked by malformed form data (CVE-2025-47287)"),
    "h11": ("0.16.0", "older versions accept malformed chunked bodies (CVE-2025-43859)"),
}
"""Versions with known holes in what a run may load, checked where it is installed."""


def versions(context: CheckContext) -> Iterator[Finding]:
    """Compare installed versions with known defects."""
    for package, (floor, why) in KNOWN_HOLES.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            if parse_version(version) < parse_version(floor):
                yield Finding("versions", "error", f"{package} {version}: {why}", f"pip install '{package}>={floor}'")
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


def cgroup_limit_bytes(mount: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the memory limit of this process's control group (v2 or v1), the lowest on its path; None if unlimited."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = []
    for controllers, path in (line.split(":", 2)[1:] for line in lines if line.count(":") >= 2):
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (mount / "memory", "memory.limit_in_bytes") if controllers else (mount, "memory.max")
        group = root / path.lstrip("/")
        for place in (group, *group.parents):
            if not place.is_relative_to(root):
                break
            try:
                text = (place / name).read_text(encoding="utf-8").strip()
            except OSError:
                continue
            if text.isdigit() and int(text) < 2**60:  # v1 writes a number near 2**63 for "unlimited"
                found.append(int(text))
    return min(found, default=None)


def full_disk(path: Path) -> list[str]:
    """Return a line that says so if the file system of a path is full."""
    try:
        free = shutil.disk_usage(path).free
    except OSError:
        return []
    return [f"No space left on device: {path} has {free / KIB:.0f} KiB free"] if free < FULL_BYTES else []


def stale_locks(context: CheckContext) -> Iterator[Finding]:
    """Find lock files of interrupted kernel builds; torch (2.13.0) waits for them forever (pytorch#189245)."""
    root = Path(context.env.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser("~/.cache/torch_extensions"))
    locks = [lock for lock in root.glob("**/lock") if time.time() - lock.stat().st_mtime > 600]
    for lock in locks:
        yield Finding("build locks", "error", f"{lock} is left over from an interrupted build", f"rm {lock}")
    if not locks:
        yield Finding("build locks", "ok", "none stale")


def shared_memory(context: CheckContext) -> Iterator[Finding]:
    """Check /dev/shm, which collectives within a host and data loaders use."""
    path = Path("/dev/shm")  # noqa: S108 - only examined
    if not path.is_dir():
        yield Finding("shared memory", "warning", f"{path} is not mounted", "mount a tmpfs there")
        return
    free = shutil.disk_usage(path).free
    level: Literal["ok", "warning"] = "ok" if free > GB else "warning"
    fix = "" if level == "ok" else "remount it larger (docker: --shm-size=16g), or remove old files"
    yield Finding("shared memory", level, f"{free / GB:.1f} GB free", fix)


def limits(context: CheckContext) -> Iterator[Finding]:
    """Check the process limits that training can hit."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    few = files != resource.RLIM_INFINITY and files < 1024
    fix = "ulimit -n 65536 (limits.conf: nofile)" if few else ""
    yield Finding("limits", "warning" if few else "ok", f"{files} open files", fix)
    if locked != resource.RLIM_INFINITY and locked < 64 * 2**10:
        yield Finding("limits", "warning", f"{locked} bytes of locked memory", "ulimit -l unlimited: RDMA needs it")


def ports(context: CheckContext) -> Iterator[Finding]:
    """Check that a rendezvous port can be opened and that this host's name resolves."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            number = probe.getsockname()[1]
        yield Finding("ports", "ok", f"port {number} could be opened")
    except OSError as error:
        yield Finding("ports", "error", f"no port can be opened: {error.strerror}", "check firewall and net namespaces")
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        fix = f"add '127.0.0.1 {socket.gethostname()}' to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        yield Finding("ports", "warning", "this host's own name does not resolve", fix)


def hosts(context: CheckContext) -> Iterator[Finding]:
    """Check that every host of the hostfile answers on its SSH port."""
    for host in context.hosts:
        try:
            with socket.create_connection((host, 22), timeout=3):
                yield Finding("hosts", "ok", f"{host} answers")
        except OSError as error:
            fix = "check the name, the network and sshd; `ssh HOST true` must work without a password"
            yield Finding("hosts", "error", f"{host} does not answer on port 22: {error}", fix)


def local_network(context: CheckContext) -> Iterator[Finding]:
    """Check whether ranks of one host get a network that other users of the host can't enter."""
    with private_network({**context.env, **import_path()}) as variables:
        private = bool(variables)
    if private:
        yield Finding("local network", "ok", "ranks of one host talk in a network of their own")
        return
    what = "other users of this host can connect to the ranks of a run: no network namespace can be made"
    fix = "allow user namespaces (user.max_user_namespaces), run in a container, or keep other users off the host"
    yield Finding("local network", "warning", what, fix)


def devices(context: CheckContext) -> Iterator[Finding]:
    """Compare the accelerators present with those visible."""
    present = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    visible = context.env.get("CUDA_VISIBLE_DEVICES")
    if not present:
        yield Finding("devices", "ok", "no NVIDIA device; training runs on the CPU")
    elif visible is not None and len([v for v in visible.split(",") if v]) < len(present):
        what = f"{len(present)} NVIDIA devices, CUDA_VISIBLE_DEVICES shows {visible or 'none'}"
        yield Finding("devices", "warning", what, "unset CUDA_VISIBLE_DEVICES to use all of them")
    else:
        yield Finding("devices", "ok", f"{len(present)} NVIDIA devices")


def processor(context: CheckContext) -> Iterator[Finding]:
    """Check that the processor's instructions for 16-bit matmuls can be used."""
    if broken_tiles(read_cpuinfo()):
        what = f"AMX is reported without its tiles: 16-bit matmuls on the CPU use {context.env.get(ONEDNN_ISA)} instead"
        yield Finding("processor", "warning", what, "have the virtual machine report CPUID leaf 0x1d, or hide AMX")
    else:
        yield Finding("processor", "ok", "instructions for matmuls are as reported")


def disk(context: CheckContext) -> Iterator[Finding]:
    """Check the free space for runs and checkpoints."""
    place = next(path for path in (context.output.resolve(), *context.output.resolve().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK):
        yield Finding("disk", "error", f"{place} can't be written to", "choose another `output`, or change its owner")
    elif free < GB:
        yield Finding("disk", "warning", f"{free / GB:.2f} GB free in {place}", "free some space, or change `output`")
    else:
        yield Finding("disk", "ok", f"{free / GB:.0f} GB free in {place}")


def write_speed(context: CheckContext) -> Iterator[Finding]:
    """Measure how fast a checkpoint can be written and synced to disk."""
    place = next(path for path in (context.output.resolve(), *context.output.resolve().parents) if path.exists())
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
    fix = "checkpoint.asynchronous: true writes in the background; a local disk may be faster" if slow else ""
    yield Finding("write speed", "warning" if slow else "ok", f"{rate:.2f} GB/s in {place}", fix)


def wandb_login(context: CheckContext) -> Iterator[Finding]:
    """Report whether runs can be logged online."""
    if has_wandb_key(context.env):
        yield Finding("W&B", "ok", "API key found")
    else:
        yield Finding("W&B", "ok", "no API key: runs are logged offline; `wandb login` adds one")


Check = Callable[[CheckContext], Iterator[Finding]]
QUICK: tuple[Check, ...] = (versions, stale_locks, shared_memory, limits, ports, devices, processor, disk)
"""Run before every `toolkit train`; they take milliseconds."""
ALL: tuple[Check, ...] = (*QUICK, local_network, hosts, write_speed, wandb_login)


def examine(context: CheckContext, checks: tuple[Check, ...] = ALL) -> list[Finding]:
    """Run the checks and return all findings."""
    return [finding for check in checks for finding in check(context)]
