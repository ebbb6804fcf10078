"""Launch files for jobs started without the toolkit: a recipe with the plan fixed, and a script or manifest."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from toolkit.clusters.cluster import Cluster
from toolkit.errors import Preempted
from toolkit.launching.launchers import WORKER, accelerate_config
from toolkit.plans.plan import Plan
from toolkit.recipe.file import dump_recipe
from toolkit.recipe.sections import AXES, ClusterSection, Recipe, StrategySection
from toolkit.run_dir.layout import new_run_path
from toolkit.units import GB, GBIT, GIB

PORT = 29500
RESTARTS = 3
IMAGE = "zero-toolkit:latest"


@dataclass(frozen=True, kw_only=True)
class Emission:
    """Everything the files are made from."""

    recipe: Recipe
    """With every axis fixed to the plan's value."""
    plan: dict[str, Any]
    deepspeed: dict[str, Any]
    cluster: Cluster
    image: str = IMAGE
    """Container image, for Kubernetes."""


def fixed_recipe(recipe: Recipe, plan: Plan, cluster: Cluster) -> Recipe:
    """Return a recipe that resolves to exactly this plan, on any machine."""
    axes = {axis: getattr(plan, axis) for axis in AXES}
    strategy = StrategySection(name=plan.strategy, nvme_path=recipe.strategy.nvme_path, **axes)
    return replace(recipe, strategy=strategy, cluster=recipe.cluster if recipe.cluster == "auto" else _inline(cluster))


def files(target: str, emission: Emission) -> dict[str, str]:
    """Return file name → contents for one of `TARGETS`."""
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
    config = accelerate_config(Path("deepspeed.json"), cluster.devices, cluster.device.backend, cluster.nodes)
    config["main_process_port"] = PORT
    options = "--config_file accelerate.yaml"
    if cluster.nodes > 1:
        options += (
            ' --machine_rank "${NODE_RANK:?set it to 0, 1, ... on each node}" --main_process_ip "${MASTER_ADDR:?}"'
        )
    command = f"accelerate launch {options} -m {WORKER} recipe.yaml"
    return {"accelerate.yaml": yaml.safe_dump(config), "launch.sh": _script(command)}


def _torchrun(emission: Emission) -> dict[str, str]:
    """Return a torchrun script. With checkpoints, failed workers restart and resume, so nodes must share RUN_DIR."""
    cluster, name = emission.cluster, emission.recipe.name
    rendezvous, run_dir = "--standalone", f"${{RUN_DIR:-runs/{name}-$(date +%Y%m%d-%H%M%S)}}"
    if cluster.nodes > 1:
        endpoint = f'--rdzv-endpoint "${{MASTER_ADDR:?the first node}}:${{MASTER_PORT:-{PORT}}}"'
        rendezvous = f"--nnodes {cluster.nodes} --rdzv-backend c10d --rdzv-id {name} {endpoint}"
        run_dir = "${RUN_DIR:?set it to the run directory, the same on each node}"
    restarts = f"--max-restarts {RESTARTS} " if emission.recipe.checkpoint.every else ""
    options = f"{rendezvous} {restarts}--nproc-per-node {cluster.devices_per_node}"
    command = f'torchrun {options} -m {WORKER} recipe.yaml --run-dir "{run_dir}"'
    # torch (2.13.0) reuses one TCPStore across restarts: new workers read addresses of dead ones and hang forever.
    # Obsolete when test_launch_files.py's restart of a killed worker passes without it.
    return {"launch.sh": _script(command, "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")}


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
    "# Each task is one worker and reads its rank from Slurm. A preempted run resumes in the same directory.",
    "# When a task ends, the others get 60 s: killed at once, they could not report that they were preempted.",
    f'srun --kill-on-bad-exit=0 --wait=60 python -P -m {WORKER} recipe.yaml --run-dir "runs/job-$SLURM_JOB_ID"',
    "code=$?",
    f"if [ $code -eq {Preempted.exit_code} ]; then scontrol requeue \"$SLURM_JOB_ID\"; fi",
    "exit $code",
)  # fmt: skip


def _kubernetes(emission: Emission) -> dict[str, str]:
    recipe = emission.recipe
    text = manifest(
        recipe.name,
        dump_recipe(recipe),
        emission.cluster,
        image=emission.image,
        run_dir=str(new_run_path("runs", recipe.name)),
    )
    return {"job.yaml": text, "launch.sh": _script("kubectl apply -f job.yaml")}


def _inline(cluster: Cluster) -> ClusterSection:
    return ClusterSection(
        device=cluster.device.name,
        nodes=cluster.nodes,
        devices_per_node=cluster.devices_per_node,
        intra_gb_per_second=cluster.intra_bytes_per_second / GB,
        inter_gbps_per_device=cluster.inter_bytes_per_second / GBIT,
        host_memory_gib=cluster.host_memory_bytes / GIB,
        nvme_gib=cluster.nvme_bytes / GIB,
        sites=cluster.sites,
        site_gbps=cluster.site_bytes_per_second / GBIT or None,
        site_latency_ms=cluster.site_latency_seconds * 1000,
    )


def _script(command: str, *first: str) -> str:
    """Return a script that runs in its own directory; it contains only fixed words and validated names."""
    assert shlex.split(command, comments=False)
    lines = ["#!/usr/bin/env bash", "set -euo pipefail", 'cd "$(dirname "$0")"', *first, f'exec {command} "$@"']
    return "\n".join(lines) + "\n"


TARGETS: dict[str, Callable[[Emission], dict[str, str]]] = {
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
    "torchrun": _torchrun,
    "slurm": _slurm,
    "k8s": _kubernetes,
}


SECRETS = {"WANDB_API_KEY": "wandb", "HF_TOKEN": "huggingface"}
"""Environment variable → Kubernetes secret; its key `token` contains the value."""
_DEVICES = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}


def object_name(run_name: str) -> str:
    """Return a run's name as Kubernetes allows it: lower-case letters, digits and `-`, at most 50 characters."""
    letters = [letter if letter.isalnum() else "-" for letter in run_name.lower()]
    return "".join(letters)[:50].strip("-")


def manifest(run_name: str, recipe: str, cluster: Cluster, *, image: str, run_dir: str) -> str:
    """Return the config map and the PyTorchJob, one process per device; a restarted pod resumes in `run_dir`."""
    name = object_name(run_name)
    recipe_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-recipe"},
        "data": {"recipe.yaml": recipe},
    }
    template = {"spec": _pod(name, cluster, image, run_dir)}
    roles = {"Master": _replicas(1, template)}
    if cluster.nodes > 1:
        roles["Worker"] = _replicas(cluster.nodes - 1, template)
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "nprocPerNode": str(cluster.devices_per_node),
            "runPolicy": {"backoffLimit": 3, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": roles,
        },
    }
    needs = (
        f"# Needs: the image {image} with this toolkit installed, a volume claim {name}-runs that all pods can write,\n"
        f"# and, if used, the secrets {', '.join(SECRETS.values())} each with a key `token`.\n"
    )
    documents = [yaml.dump(document, Dumper=_Plain, sort_keys=False) for document in (recipe_map, job)]
    return needs + "---\n".join(documents)


class _Plain(yaml.SafeDumper):
    """Writes no anchors: both roles are spelled out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _replicas(count: int, template: dict[str, Any]) -> dict[str, Any]:
    return {"replicas": count, "restartPolicy": "OnFailure", "template": template}


def _pod(name: str, cluster: Cluster, image: str, run_dir: str) -> dict[str, Any]:
    """Return the pod. Shared memory is a memory-backed volume: collectives within a host and data loaders use it."""
    amounts = {"memory": f"{cluster.host_memory_bytes // GIB * 9 // 10}Gi"}
    if cluster.device.backend in _DEVICES:
        amounts[_DEVICES[cluster.device.backend]] = str(cluster.devices_per_node)
    container = {
        "name": "pytorch",  # the operator requires this name
        "image": image,
        "command": ["torchrun", "-m", WORKER, "/recipe/recipe.yaml", "--run-dir", run_dir],
        "env": [
            {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": "token", "optional": True}}}
            for key, secret in SECRETS.items()
        ],
        "resources": {"limits": amounts, "requests": dict(amounts)},
        "volumeMounts": [
            {"name": "recipe", "mountPath": "/recipe", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - a mount point
            {"name": "runs", "mountPath": "/workspace"},
        ],
        "workingDir": "/workspace",
    }
    volumes: list[dict[str, Any]] = [
        {"name": "recipe", "configMap": {"name": f"{name}-recipe"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{cluster.host_memory_bytes // GIB // 4}Gi"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": f"{name}-runs"}},
    ]
    return {"containers": [container], "volumes": volumes}
