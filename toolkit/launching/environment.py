"""Environment of processes: what workers inherit, what a launcher or Slurm has set, API keys, free ports."""

from __future__ import annotations

import itertools
import netrc
import os
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import BadInput

PARENT = "TOOLKIT_PARENT"
"""Environment variable with the supervisor's process id; a worker ends itself when that process is gone."""
RENDEZVOUS = "TOOLKIT_RENDEZVOUS"
"""Environment variable with the file through which the ranks of one host meet; without it they meet at MASTER_ADDR."""
START_DIRECTORY = "TOOLKIT_START_DIRECTORY"
"""Environment variable with the directory that a worker changes to, if its launcher was started in another one."""
_EXPORTED = (
    *("NCCL_", "GLOO_", "UCX_", "FI_", "HF_", "TRANSFORMERS_", "WANDB_", "OMP_", "DS_", "LD_LIBRARY_PATH"),
    *("TORCH_", "PYTORCH_", "TRITON_", "CUDA_"),
)
_OF_ONE_HOST = ("CUDA_VISIBLE_DEVICES",)
"""Settings that are not passed on: the device numbers of one host say nothing about another."""
"""Prefixes of the settings that are passed to other hosts."""
_OLD_DUMP = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
ONEDNN_ISA = "ONEDNN_MAX_CPU_ISA"
"""Environment variable with the newest processor instructions that oneDNN may use."""
_TILE_LEAF = 0x1D
"""CPUID leaf that describes AMX tiles."""
NCCL_ALGORITHMS = {"ring": "Ring", "tree": "Tree"}
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")


def environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a copy of this process's environment variables, with `added` on top."""
    return {**os.environ, **(added or {})}


def set_own_ray() -> None:
    """Settings for a Ray cluster that we start ourselves.

    Ray (2.60.0) otherwise sends usage statistics, and lowers the priority of its workers, so that they
    train slower than under other launchers on a busy host. Values that the user has set are kept.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")


def set_safe_path() -> None:
    """Let Python processes that `multiprocessing` starts from now on import nothing from the current directory.

    It starts them with `python -c`, which puts the current directory first on the path: a file there that is named like
    a module of the standard library, such as signal.py, would run.
    """
    os.environ["PYTHONSAFEPATH"] = "1"


def exported(env: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that other hosts get. They include secrets: pass them through ssh, never in an argv."""
    return {
        key: value
        for key, value in env.items()
        if (key.startswith(_EXPORTED) or key.upper() in _PROXIES) and key not in _OF_ONE_HOST
    }


def nccl_settings(algorithm: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that select NCCL's all-reduce algorithm; raise `BadInput` if the environment has another."""
    if algorithm not in NCCL_ALGORITHMS:
        return {}
    wanted, given = NCCL_ALGORITHMS[algorithm], env.get("NCCL_ALGO")
    if given is not None and given.lower() != wanted.lower():
        what = f"{algorithm} given, but the environment has NCCL_ALGO={given}; remove one of them"
        raise BadInput("train.reduce.algorithm", what)
    return {"NCCL_ALGO": wanted}


def broken_tiles(cpuinfo: str) -> bool:
    """Return whether /proc/cpuinfo shows a processor that reports AMX without describing its tiles.

    Some virtual machines do: their CPUID ends before the leaf of the tiles. oneDNN 3.12 (torch 2.13.0) does not ask how
    far CPUID goes, reads zeros, and every 16-bit matmul ends the process with SIGILL.
    """
    values = {key.strip(): value for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())}
    level = values.get("cpuid level", "").strip()
    return "amx_tile" in values.get("flags", "").split() and level.isdigit() and int(level) < _TILE_LEAF


def read_cpuinfo(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return what the kernel says about the first processor; empty where it says nothing."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return "".join(itertools.takewhile(str.strip, file))  # a blank line ends it; a host may have hundreds
    except OSError:
        return ""


def enter_processor_environment() -> None:
    """Keep oneDNN off AMX where it can't work; a value that the user has set is kept.

    Call before the first matmul, which is when oneDNN reads the variable; processes that are started later inherit it.
    `toolkit doctor` and `toolkit train` report it.
    """
    if ONEDNN_ISA not in os.environ and broken_tiles(read_cpuinfo()):
        os.environ[ONEDNN_ISA] = "AVX512_CORE_BF16"


def device_settings(env: Mapping[str, str], logs: Path) -> dict[str, str]:
    """Return the variables that a worker on an accelerator starts with; those that the user has set are kept.

    Expandable segments keep torch's allocator from fragmenting when sizes vary between steps. NCCL's flight recorder
    writes the last collectives of every rank to `logs` when one times out, so that a hang names the collective.
    """
    wanted = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(logs / "nccl-rank-"),
    }
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & env.keys():
        wanted["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    older = {"TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE": _OLD_DUMP}
    return {key: value for key, value in wanted.items() if key not in env and older.get(key, key) not in env}


def device_ordinal(local_rank: int, visible: int) -> int:
    """Return the number of a rank's device among those that its process can see.

    `srun --gpus-per-task=1` and Kubernetes show every process a single device, which is number 0 for each of them.
    """
    if visible == 1:
        return 0
    if local_rank >= visible:
        what = f"local rank {local_rank} needs a device of its own, and this process sees {visible}"
        raise BadInput("devices", f"{what}; start fewer processes per host, or check CUDA_VISIBLE_DEVICES")
    return local_rank


def cores_near(pci_address: str, allowed: Collection[int], sysfs: Path = Path("/sys")) -> set[int]:
    """Return the allowed cores of a device's NUMA node; all of them where the system does not say."""
    try:
        text = (sysfs / "bus/pci/devices" / pci_address.lower() / "local_cpulist").read_text().strip()
        ranges = [part.partition("-") for part in text.split(",") if part]
        near = {core for low, _, high in ranges for core in range(int(low), int(high or low) + 1)}
    except (OSError, ValueError):
        return set(allowed)
    return near & set(allowed) or set(allowed)


def enter_device_environment(logs: Path) -> None:
    """Apply the settings of a worker on an accelerator. Call before torch is imported; on a CPU they change nothing."""
    os.environ.update(device_settings(os.environ, logs))


def use_device(ordinal: int) -> None:
    """Give DeepSpeed the device's number, which it takes from LOCAL_RANK."""
    os.environ["LOCAL_RANK"] = str(ordinal)


def adopt_slurm() -> None:
    """Set RANK, WORLD_SIZE and so on from Slurm's variables if `srun` started this worker.

    The job script sets MASTER_ADDR; without it, this process is inside an allocation but not one of its tasks.
    """
    env = os.environ
    if "RANK" in env or "SLURM_PROCID" not in env or "MASTER_ADDR" not in env:
        return
    env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], env["SLURM_NTASKS"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env["LOCAL_WORLD_SIZE"] = env.get("SLURM_NTASKS_PER_NODE", env["SLURM_NTASKS"])


@dataclass(frozen=True)
class JobPlace:
    """The place of a process in a job that a launcher started."""

    rank: int
    world: int
    per_node: int


def job_place() -> JobPlace | None:
    """Return this process's place if torchrun or `srun` started several; None if it is the only one."""
    adopt_slurm()
    found = os.environ
    if int(found.get("WORLD_SIZE", 1)) < 2 or "RANK" not in found:
        return None
    world = int(found["WORLD_SIZE"])
    return JobPlace(int(found["RANK"]), world, int(found.get("LOCAL_WORLD_SIZE", world)))


def use_loopback() -> None:
    """Keep gloo and NCCL of a run on one host off the network; values that the user has set are kept.

    gloo (torch 2.13) otherwise listens at the address that the host's own name leads to, even if the ranks meet at
    127.0.0.1. NCCL takes the name exactly after `=`.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for name in names[:1]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def enter_start_directory() -> None:
    """Change to the directory in which the run was started, if the launcher was started elsewhere."""
    if START_DIRECTORY in os.environ:
        os.chdir(os.environ[START_DIRECTORY])


def own_address() -> str:
    """Return the address under which ssh reached this host; empty for a loopback address or without ssh."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 and not words[2].startswith(("127.", "::1")) else ""


def has_wandb_key(env: Mapping[str, str]) -> bool:
    """Return whether W&B finds an API key: in WANDB_API_KEY, or in ~/.netrc, where `wandb login` stores it."""
    if env.get("WANDB_API_KEY"):
        return True
    try:
        return any("wandb" in host for host in netrc.netrc(str(Path.home() / ".netrc")).hosts)
    except (OSError, RuntimeError, UnicodeDecodeError, netrc.NetrcParseError):  # RuntimeError: no home directory
        return False


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
