"""Names of the parts of step time and memory, and which predicted parts they correspond to."""

from __future__ import annotations

from collections.abc import Mapping

PARTS: dict[str, str] = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "grad_sync": "gradient synchronisation",
    "param_gather": "gathering parameters (ZeRO)",
    "tp_comm": "tensor-parallel traffic",
    "sp_comm": "sequence and expert traffic",
    "pp_comm": "stage to stage",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "agree": "rank synchronisation",
    "checkpoint": "checkpoint",
    "evaluate": "evaluation",
    "other": "other",
}
"""Measured parts of `wall_seconds`, in display order. Communication is the exposed part: the time for which it blocked
the rank."""

COMMUNICATION = ("grad_sync", "param_gather", "tp_comm", "sp_comm", "pp_comm", "bubble", "agree")
"""Parts in which a rank waits for others."""

BETWEEN_STEPS = ("checkpoint", "evaluate")
"""Parts between two steps; time inside them is attributed to them alone."""

COMPARED: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "compute": ("forward and backward", ("compute", "recompute"), ("forward", "backward")),
    "dp_comm": ("gradient sync and ZeRO traffic", ("dp_comm",), ("grad_sync", "param_gather")),
    "tp_comm": ("tensor-parallel traffic", ("tp_comm",), ("tp_comm",)),
    "sp_comm": ("sequence and expert traffic", ("sp_comm",), ("sp_comm",)),
    "pp_comm": ("stage to stage", ("pp_comm",), ("pp_comm",)),
    "pp_bubble": ("pipeline bubble", ("pp_bubble",), ("bubble",)),
    "optimizer": ("optimizer", ("optimizer",), ("optimizer",)),
    "fixed": ("data, host and the rest", ("fixed",), ("data", "agree", "other")),
}
"""What can be compared: name → description, predicted parts (`time` in plan.json), measured parts."""

MEMORY: dict[str, tuple[str, tuple[str, ...]]] = {
    "weights": ("weights", ("params",)),
    "optimizer": ("masters and moments", ("optimizer",)),
    "gradients": ("gradients", ("grads",)),
    "buffers": ("buffers and gathered weights", ("buffers", "gathered")),
    "activations": ("activations and logits", ("activations", "logits")),
}
"""Parts of a rank's peak memory: name → description, predicted parts (`memory` in plan.json)."""


def predicted_parts(time: Mapping[str, float]) -> dict[str, float]:
    """Predicted seconds per step of each comparable part, from the plan's `time`."""
    return {name: sum(time.get(key, 0.0) for key in keys) for name, (_, keys, _) in COMPARED.items()}


def measured_parts(parts: Mapping[str, float]) -> dict[str, float]:
    """Measured seconds per step of each comparable part; checkpoints and evaluations are not predicted and left out."""
    return {name: sum(parts.get(key, 0.0) for key in keys) for name, (_, _, keys) in COMPARED.items()}
