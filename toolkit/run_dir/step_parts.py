"""The parts of a step's time: their names, and which part of the prediction each belongs to."""

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
    "agree": "agreeing with other ranks",
    "checkpoint": "checkpoint",
    "evaluate": "evaluation",
    "other": "other",
}
"""Measured parts of `wall_seconds`, in the order in which they are shown. Communication is the exposed part: the time
for which it held the rank."""

COMMUNICATION = ("grad_sync", "param_gather", "tp_comm", "sp_comm", "pp_comm", "bubble", "agree")
"""Parts in which a rank waits for others."""

BETWEEN_STEPS = ("checkpoint", "evaluate")
"""Parts that stand between two steps and swallow what runs inside them."""

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
"""What can be compared: name → words, predicted parts (of `plan.json`'s time), measured parts."""

MEMORY: dict[str, tuple[str, tuple[str, ...]]] = {
    "weights": ("weights", ("params",)),
    "optimizer": ("masters and moments", ("optimizer",)),
    "gradients": ("gradients", ("grads",)),
    "buffers": ("buffers and gathered weights", ("buffers", "gathered")),
    "activations": ("activations and logits", ("activations", "logits")),
}
"""Parts of a rank's memory at its peak: name → words, predicted parts (of `plan.json`'s memory)."""


def predicted_parts(time: Mapping[str, float]) -> dict[str, float]:
    """Seconds a step of each comparable part, from the plan's `time`."""
    return {name: sum(time.get(key, 0.0) for key in keys) for name, (_, keys, _) in COMPARED.items()}


def measured_parts(parts: Mapping[str, float]) -> dict[str, float]:
    """The same from measured parts; checkpoints are not predicted and stay out."""
    return {name: sum(parts.get(key, 0.0) for key in keys) for name, (_, _, keys) in COMPARED.items()}
