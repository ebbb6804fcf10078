"""How worker processes are started: argv lists and environment, never a shell string."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.errors import BadInput
from toolkit.launching.hostfile import Host

LAUNCHERS = ("local", "deepspeed", "accelerate", "torchrun", "ray")
WORKER = "toolkit.worker"
PARENT = "TOOLKIT_PARENT"
"""Environment variable with the supervisor's process id: a worker whose parent has gone ends itself."""
_EXPORTED = ("NCCL_", "GLOO_", "UCX_", "HF_", "TRANSFORMERS_", "WANDB_", "TORCH_", "OMP_", "DS_", "LD_LIBRARY_PATH")
NCCL_ALGORITHMS = {"ring": "Ring", "tree": "Tree"}
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|PROXY", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Command:
    """One process to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """What is added to the environment."""
    rank: int | None = None
    """The rank, where the process is a worker itself."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One host's part of a run."""

    processes: int
    """Workers on this host, as many as on every other."""
    port: int
    """Where the workers meet."""
    address: str = "127.0.0.1"
    """The first host."""
    index: int = 0
    count: int = 1

    @property
    def world(self) -> int:
        """Workers on all hosts."""
        return self.processes * self.count


def commands(launcher: str, run_dir: Path, nproc: int, backend: str, node: Node | None = None) -> list[Command]:
    """What to start on one host: every worker (`local`), or one launcher that starts them."""
    node = node or Node(processes=nproc, port=free_port())
    env = _common_env(backend)
    worker = ("--run-dir", str(run_dir))
    if launcher == "local":
        return _local(worker, node, env)
    argv = {"deepspeed": _deepspeed, "torchrun": _torchrun, "accelerate": _accelerate}[launcher](run_dir, node)
    return [Command(argv=(sys.executable, "-m", *argv, "--module", WORKER, *worker), env=env)]


def _deepspeed(run_dir: Path, node: Node) -> tuple[str, ...]:
    return (
        "deepspeed.launcher.runner",
        *("--num_gpus", str(node.processes)),
        *("--master_port", str(node.port)),
        "--no_local_rank",
    )


def deepspeed_fleet(run_dir: Path, hosts: Sequence[Host], node: Node, backend: str) -> Command:
    """DeepSpeed's own launcher over many hosts, by pdsh; settings travel in a file, for they stand on command lines."""
    argv = (
        *("deepspeed.launcher.runner", "--hostfile", str(run_dir / "hostfile")),
        *("--include", "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in hosts)),
        *("--master_addr", node.address, "--master_port", str(node.port)),
        *("--launcher", "pdsh", "--force_multi", "--no_local_rank"),
        *("--module", WORKER, "--run-dir", str(run_dir)),
    )
    env = {**_common_env(backend), "DS_ENV_FILE": str(run_dir / "deepspeed_env")}
    return Command(argv=(sys.executable, "-m", *argv), env=env)


def _torchrun(run_dir: Path, node: Node) -> tuple[str, ...]:
    meeting: tuple[str, ...] = ("--standalone",)
    if node.count > 1:
        meeting = ("--nnodes", str(node.count), "--node-rank", str(node.index))
        meeting += ("--master-addr", node.address, "--master-port", str(node.port))
    return ("torch.distributed.run", *meeting, "--nproc-per-node", str(node.processes))


def _accelerate(run_dir: Path, node: Node) -> tuple[str, ...]:
    meeting = ("--main_process_ip", node.address, "--machine_rank", str(node.index)) if node.count > 1 else ()
    options = ("--config_file", str(run_dir / "accelerate.yaml"), "--main_process_port", str(node.port))
    return ("accelerate.commands.launch", *options, *meeting)


def accelerate_config(deepspeed_json: Path, nproc: int, backend: str, nodes: int = 1) -> dict[str, object]:
    """The `accelerate launch` config that starts the same workers."""
    deepspeed: dict[str, object] = {"deepspeed_config_file": str(deepspeed_json), "zero3_init_flag": False}
    if nodes > 1:  # started on each node; without this the first one would start all by pdsh
        deepspeed["deepspeed_multinode_launcher"] = "standard"
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": deepspeed,
        "machine_rank": 0,
        "num_machines": nodes,
        "num_processes": nproc,
        "use_cpu": backend == "cpu",
    }


def environment(command: Command | None = None) -> dict[str, str]:
    """This process's environment, with what a command adds to it."""
    return {**os.environ, **(command.env if command else {})}


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


def is_secret(name: str) -> bool:
    """Whether a setting must stay off command lines and out of files."""
    return bool(_SECRET.search(name))


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


def _local(worker: tuple[str, ...], node: Node, env: Mapping[str, str]) -> list[Command]:
    shared = {
        **env,
        "WORLD_SIZE": str(node.world),
        "LOCAL_WORLD_SIZE": str(node.processes),
        "MASTER_ADDR": node.address,
        "MASTER_PORT": str(node.port),
    }
    first = node.index * node.processes
    return [
        Command(
            argv=(sys.executable, "-m", WORKER, *worker),
            env={**shared, "RANK": str(first + local), "LOCAL_RANK": str(local)},
            rank=first + local,
        )
        for local in range(node.processes)
    ]


def _common_env(backend: str) -> dict[str, str]:
    env = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    package_root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    if backend == "cpu":
        env["DS_ACCELERATOR"] = "cpu"  # also on a host that has accelerators
    return env
