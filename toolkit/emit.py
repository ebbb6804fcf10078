"""Launch files for people who start jobs without us: the plan fixed in a recipe, and a script or manifest around it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from toolkit.cluster import Cluster
from toolkit.launch import WORKER, accelerate_config
from toolkit.plan import AXES, Plan
from toolkit.recipe import ClusterSection, Recipe, Strategy
from toolkit.recipe_file import dump_recipe

GIB = 2**30
GBIT = 10**9 / 8
PORT = 29500
PREEMPTED = 75
"""Exit code of a worker that was asked to stop and saved a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Emission:
    """What the files are made from."""

    recipe: Recipe
    """With every axis fixed to the plan's value."""
    plan: dict[str, Any]
    deepspeed: dict[str, Any]
    cluster: Cluster


def fixed_recipe(recipe: Recipe, plan: Plan, cluster: Cluster) -> Recipe:
    """The recipe that plans to exactly this plan, on any machine."""
    axes = {axis: getattr(plan, axis) for axis in AXES}
    strategy = Strategy(name=plan.strategy, nvme_path=recipe.strategy.nvme_path, **axes)
    return replace(recipe, strategy=strategy, cluster=recipe.cluster if recipe.cluster == "auto" else _inline(cluster))


def files(target: str, emission: Emission) -> dict[str, str]:
    """File name → contents for one of `TARGETS`."""
    common = {
        "recipe.yaml": dump_recipe(emission.recipe),
        "plan.json": json.dumps(emission.plan, indent=2) + "\n",
        "deepspeed.json": json.dumps(emission.deepspeed, indent=2) + "\n",
    }
    return common | TARGETS[target](emission)


def _deepspeed(emission: Emission) -> dict[str, str]:
    cluster = emission.cluster
    hosts = ["localhost"] if cluster.nodes == 1 else [f"node-{number}" for number in range(cluster.nodes)]
    hostfile = "".join(f"{host} slots={cluster.devices_per_node}\n" for host in hosts)
    if cluster.nodes == 1:
        start = f"deepspeed --num_gpus {cluster.devices_per_node}"
    else:
        start = "deepspeed --hostfile hostfile"
    return {"hostfile": hostfile, "launch.sh": _script(f"{start} --module {WORKER} recipe.yaml")}


def _accelerate(emission: Emission) -> dict[str, str]:
    cluster = emission.cluster
    config = accelerate_config(Path("deepspeed.json"), cluster.devices, cluster.device.backend)
    config |= {"num_machines": cluster.nodes, "main_process_port": PORT}
    options = "--config_file accelerate.yaml"
    if cluster.nodes > 1:
        options += (
            ' --machine_rank "${NODE_RANK:?set it to 0, 1, ... on each node}" --main_process_ip "${MASTER_ADDR:?}"'
        )
    command = f"accelerate launch {options} -m {WORKER} recipe.yaml"
    return {"accelerate.yaml": yaml.safe_dump(config), "launch.sh": _script(command)}


def _torchrun(emission: Emission) -> dict[str, str]:
    cluster = emission.cluster
    rendezvous = "--standalone"
    if cluster.nodes > 1:
        endpoint = f'--rdzv-endpoint "${{MASTER_ADDR:?the first node}}:{PORT}"'
        rendezvous = f"--nnodes {cluster.nodes} --rdzv-backend c10d --rdzv-id {emission.recipe.name} {endpoint}"
    command = f"torchrun {rendezvous} --nproc-per-node {cluster.devices_per_node} -m {WORKER} recipe.yaml"
    return {"launch.sh": _script(command)}


def _slurm(emission: Emission) -> dict[str, str]:
    cluster, name = emission.cluster, emission.recipe.name
    directives = [
        f"--job-name={name}",
        f"--nodes={cluster.nodes}",
        f"--ntasks-per-node={cluster.devices_per_node}",
        *([] if cluster.device.backend == "cpu" else [f"--gpus-per-node={cluster.devices_per_node}"]),
        "--requeue",
        "--signal=USR1@120",
        f"--output={name}-%j.out",
    ]
    lines = ["#!/bin/bash", *(f"#SBATCH {directive}" for directive in directives), *_SLURM_BODY]
    return {"job.sbatch": "\n".join(lines) + "\n", "launch.sh": _script("sbatch job.sbatch")}


_SLURM_BODY = (
    "set -uo pipefail",
    'cd "$SLURM_SUBMIT_DIR"',
    'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    f"MASTER_PORT=$(({PORT} + SLURM_JOB_ID % 1000))",
    "export MASTER_ADDR MASTER_PORT",
    "# Each task is one worker and takes its rank from Slurm. A run that was preempted goes on in the same directory.",
    f'srun --kill-on-bad-exit=1 python -m {WORKER} recipe.yaml --run-dir "runs/job-$SLURM_JOB_ID"',
    "code=$?",
    f"if [ $code -eq {PREEMPTED} ]; then scontrol requeue \"$SLURM_JOB_ID\"; fi",
    "exit $code",
)  # fmt: skip


def _kubernetes(emission: Emission) -> dict[str, str]:
    name = emission.recipe.name.lower().replace("_", "-").replace(".", "-").strip("-")[:50]
    recipe_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-recipe"},
        "data": {"recipe.yaml": dump_recipe(emission.recipe)},
    }
    roles: dict[str, Any] = {"Master": _replicas(name, 1, emission.cluster)}
    if emission.cluster.nodes > 1:
        roles["Worker"] = _replicas(name, emission.cluster.nodes - 1, emission.cluster)
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "nprocPerNode": str(emission.cluster.devices_per_node),
            "runPolicy": {"backoffLimit": 3, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": roles,
        },
    }
    return {
        "job.yaml": yaml.safe_dump_all([recipe_map, job], sort_keys=False),
        "launch.sh": _script("kubectl apply -f job.yaml"),
    }


def _replicas(name: str, count: int, cluster: Cluster) -> dict[str, Any]:
    """Pods of one role. Secrets are named, never written; shared memory is a memory volume, for the loader and NCCL."""
    limits: dict[str, str] = {"memory": f"{cluster.host_memory_bytes // GIB * 9 // 10}Gi"}
    vendor = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}.get(cluster.device.backend)
    if vendor:
        limits[vendor] = str(cluster.devices_per_node)
    secrets = {"WANDB_API_KEY": "wandb", "HF_TOKEN": "huggingface"}
    container = {
        "name": "pytorch",
        "image": "zero-toolkit:latest",
        "command": ["torchrun", "-m", WORKER, "/recipe/recipe.yaml"],
        "env": [
            {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": "token", "optional": True}}}
            for key, secret in secrets.items()
        ],
        "resources": {"limits": limits},
        "volumeMounts": [
            {"name": "recipe", "mountPath": "/recipe", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - a mount point
            {"name": "runs", "mountPath": "/workspace"},
        ],
        "workingDir": "/workspace",
    }
    volumes = [
        {"name": "recipe", "configMap": {"name": f"{name}-recipe"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": f"{name}-runs"}},
    ]
    pod = {"containers": [container], "volumes": volumes}
    return {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": pod}}


def _inline(cluster: Cluster) -> ClusterSection:
    return ClusterSection(
        device=cluster.device.name,
        nodes=cluster.nodes,
        devices_per_node=cluster.devices_per_node,
        intra_gb_per_second=cluster.intra_bytes_per_second / 1e9,
        inter_gbps_per_device=cluster.inter_bytes_per_second / GBIT,
        host_memory_gib=cluster.host_memory_bytes / GIB,
        nvme_gib=cluster.nvme_bytes / GIB,
        sites=cluster.sites,
        site_gbps=cluster.site_bytes_per_second / GBIT or None,
        site_latency_ms=cluster.site_latency_seconds * 1000,
    )


def _script(command: str) -> str:
    """A script that works from its own directory; only fixed words and checked names are in it."""
    assert shlex.split(command, comments=False)
    return f'#!/usr/bin/env bash\nset -euo pipefail\ncd "$(dirname "$0")"\nexec {command} "$@"\n'


TARGETS: dict[str, Callable[[Emission], dict[str, str]]] = {
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
    "torchrun": _torchrun,
    "slurm": _slurm,
    "k8s": _kubernetes,
}
