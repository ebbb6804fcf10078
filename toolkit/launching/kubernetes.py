"""A Kubeflow PyTorchJob with its recipe in a config map. Secrets are named, never written."""

from __future__ import annotations

from typing import Any

import yaml

from toolkit.clusters.cluster import Cluster
from toolkit.launching.launchers import WORKER

GIB = 2**30
SECRETS = {"WANDB_API_KEY": "wandb", "HF_TOKEN": "huggingface"}
"""Variable → secret whose key `token` holds it."""
_DEVICES = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}


def object_name(run_name: str) -> str:
    """A run's name as Kubernetes allows it: lower-case letters, digits and `-`, at most 50."""
    letters = [letter if letter.isalnum() else "-" for letter in run_name.lower()]
    return "".join(letters)[:50].strip("-")


def manifest(run_name: str, recipe: str, cluster: Cluster, *, image: str, run_dir: str) -> str:
    """The config map and the job, one process a device; a pod that fails goes on in the same run directory."""
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
        f"# Needs: the image {image} with this toolkit in it, a volume claim {name}-runs that all pods can write to,\n"
        f"# and, if they are used, the secrets {', '.join(SECRETS.values())} with a key `token` each.\n"
    )
    documents = [yaml.dump(document, Dumper=_Plain, sort_keys=False) for document in (recipe_map, job)]
    return needs + "---\n".join(documents)


class _Plain(yaml.SafeDumper):
    """Without anchors: both roles are written out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _replicas(count: int, template: dict[str, Any]) -> dict[str, Any]:
    return {"replicas": count, "restartPolicy": "OnFailure", "template": template}


def _pod(name: str, cluster: Cluster, image: str, run_dir: str) -> dict[str, Any]:
    """Shared memory is a memory volume: collectives of one host and data loaders go through it."""
    amounts = {"memory": f"{cluster.host_memory_bytes // GIB * 9 // 10}Gi"}
    if cluster.device.backend in _DEVICES:
        amounts[_DEVICES[cluster.device.backend]] = str(cluster.devices_per_node)
    container = {
        "name": "pytorch",  # the operator looks for this name
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
