"""Checks manifests against the OpenAPI tables of Kubeflow's and Kubernetes' Python clients: keys, types, presence."""

from __future__ import annotations

import re
from typing import Any

from kubeflow.training import models as kubeflow_models
from kubernetes.client import models as kubernetes_models

QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
PLAIN = {"str": str, "int": int, "bool": bool, "object": object, "float": float}


def problems(value: Any, kind: str, where: str = "") -> list[str]:
    """What is wrong with a value of an OpenAPI type, e.g. `list[V1EnvVar]`."""
    if kind in PLAIN:
        is_right = isinstance(value, PLAIN[kind]) and not (kind == "int" and isinstance(value, bool))
        return [] if is_right else [f"{where}: {value!r} is no {kind}"]
    inner = re.fullmatch(r"(?:list\[|dict\(str, )(.+)[\])]", kind)
    if inner and kind.startswith("list"):
        if not isinstance(value, list):
            return [f"{where}: {value!r} is no list"]
        return [
            problem for number, item in enumerate(value) for problem in problems(item, inner[1], f"{where}[{number}]")
        ]
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is no mapping"]
    if inner:
        return [problem for key, item in value.items() for problem in problems(item, inner[1], f"{where}.{key}")]
    return _object_problems(value, kind, where)


def _object_problems(value: dict[str, Any], kind: str, where: str) -> list[str]:
    model = getattr(kubeflow_models, kind, None) or getattr(kubernetes_models, kind)
    types = {model.attribute_map[name]: given for name, given in model.openapi_types.items()}
    found = [f"{where}.{key}: unknown key of {kind}" for key in value if key not in types]
    for key, item in value.items():
        if key in types:
            found += problems(item, types[key], f"{where}.{key}")
    return found + _missing(value, model, where)


def _missing(value: dict[str, Any], model: type, where: str) -> list[str]:
    """The clients refuse to make an object without what the schema requires."""
    names = {json: name for name, json in model.attribute_map.items()}  # type: ignore[attr-defined]
    try:
        model(**{names[key]: item for key, item in value.items() if key in names})
    except ValueError as error:
        return [f"{where}: {error}"]
    return []
