"""How worker processes are started: argv lists and environment, never a shell string."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LAUNCHERS = ("local", "deepspeed", "accelerate", "torchrun")
WORKER = "toolkit.worker"
PARENT = "TOOLKIT_PARENT"
"""Environment variable with the supervisor's process id: a worker whose parent has gone ends itself."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One process to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """What is added to the environment."""
    rank: int | None = None
    """The rank, where the process is a worker itself."""


def commands(launcher: str, run_dir: Path, nproc: int, backend: str) -> list[Command]:
    """What to start for one host: every worker (`local`), or one launcher that starts them."""
    env = _common_env(backend)
    worker = ("--run-dir", str(run_dir))
    if launcher == "local":
        return _local(worker, nproc, env)
    argv = {"deepspeed": _deepspeed, "torchrun": _torchrun, "accelerate": _accelerate}[launcher](run_dir, str(nproc))
    return [Command(argv=(sys.executable, "-m", *argv, "--module", WORKER, *worker), env=env)]


def _deepspeed(run_dir: Path, nproc: str) -> tuple[str, ...]:
    return (
        "deepspeed.launcher.runner",
        *("--num_gpus", nproc),
        *("--master_port", str(free_port())),
        "--no_local_rank",
    )


def _torchrun(run_dir: Path, nproc: str) -> tuple[str, ...]:
    return ("torch.distributed.run", "--standalone", "--nproc-per-node", nproc)


def _accelerate(run_dir: Path, nproc: str) -> tuple[str, ...]:
    config = str(run_dir / "accelerate.yaml")
    return ("accelerate.commands.launch", "--config_file", config, "--main_process_port", str(free_port()))


def accelerate_config(deepspeed_json: Path, nproc: int, backend: str) -> dict[str, object]:
    """The `accelerate launch` config that starts the same workers."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": str(deepspeed_json), "zero3_init_flag": False},
        "machine_rank": 0,
        "num_machines": 1,
        "num_processes": nproc,
        "use_cpu": backend == "cpu",
    }


def environment(command: Command | None = None) -> dict[str, str]:
    """This process's environment, with what a command adds to it."""
    return {**os.environ, **(command.env if command else {})}


def adopt_slurm() -> None:
    """Take rank and world from Slurm where `srun` starts workers: the job script has set where they meet."""
    env = os.environ
    if "RANK" in env or "SLURM_PROCID" not in env or "MASTER_ADDR" not in env:
        return
    env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], env["SLURM_NTASKS"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env["LOCAL_WORLD_SIZE"] = env.get("SLURM_NTASKS_PER_NODE", env["SLURM_NTASKS"])


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _local(worker: tuple[str, ...], nproc: int, env: Mapping[str, str]) -> list[Command]:
    port = str(free_port())
    shared = {
        **env,
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return [
        Command(
            argv=(sys.executable, "-m", WORKER, *worker),
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            rank=rank,
        )
        for rank in range(nproc)
    ]


def _common_env(backend: str) -> dict[str, str]:
    env = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    package_root = str(Path(__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    if backend == "cpu":
        env["DS_ACCELERATOR"] = "cpu"  # also on a host that has accelerators
    return env
