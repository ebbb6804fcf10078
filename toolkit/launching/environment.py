"""Environment of launched processes: what they inherit, what a launcher or Slurm has set, free ports."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.errors import BadInput

PARENT = "TOOLKIT_PARENT"
"""Environment variable with the supervisor's process id: a worker whose parent has gone ends itself."""


_EXPORTED = ("NCCL_", "GLOO_", "UCX_", "HF_", "TRANSFORMERS_", "WANDB_", "TORCH_", "OMP_", "DS_", "LD_LIBRARY_PATH")


NCCL_ALGORITHMS = {"ring": "Ring", "tree": "Tree"}


_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")


def environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of this process's environment variables, with `added` on top."""
    return {**os.environ, **(added or {})}


def set_own_ray() -> None:
    """A Ray that we start ourselves tells its makers nothing, and its processes are no nicer than other launchers'."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")


def exported(env: Mapping[str, str]) -> dict[str, str]:
    """The settings that other hosts get. Secrets are among them: they may travel through ssh, never in an argv."""
    return {key: value for key, value in env.items() if key.startswith(_EXPORTED) or key.upper() in _PROXIES}


def nccl_settings(algorithm: str, env: Mapping[str, str]) -> dict[str, str]:
    """What makes NCCL reduce by the recipe's algorithm; `BadInput` if the environment says otherwise."""
    if algorithm not in NCCL_ALGORITHMS:
        return {}
    wanted, given = NCCL_ALGORITHMS[algorithm], env.get("NCCL_ALGO")
    if given is not None and given.lower() != wanted.lower():
        what = f"{algorithm} given, but the environment has NCCL_ALGO={given}; remove one of them"
        raise BadInput("train.reduce.algorithm", what)
    return {"NCCL_ALGO": wanted}


def adopt_slurm() -> None:
    """Take rank and world from Slurm where `srun` starts workers: the job script has set where they meet."""
    env = os.environ
    if "RANK" in env or "SLURM_PROCID" not in env or "MASTER_ADDR" not in env:
        return
    env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], env["SLURM_NTASKS"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env["LOCAL_WORLD_SIZE"] = env.get("SLURM_NTASKS_PER_NODE", env["SLURM_NTASKS"])


@dataclass(frozen=True)
class JobPlace:
    """Where a process is in a job that a launcher started."""

    rank: int
    world: int
    per_node: int


def job_place() -> JobPlace | None:
    """This process's place if torchrun or `srun` started several; None: it stands alone."""
    adopt_slurm()
    found = os.environ
    if int(found.get("WORLD_SIZE", 1)) < 2 or "RANK" not in found:
        return None
    world = int(found["WORLD_SIZE"])
    return JobPlace(int(found["RANK"]), world, int(found.get("LOCAL_WORLD_SIZE", world)))


def own_address() -> str:
    """The address at which ssh found this host; empty if it was called by a loopback address, or without ssh."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 and not words[2].startswith(("127.", "::1")) else ""


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
