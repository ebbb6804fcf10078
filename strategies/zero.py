"""ZeRO: data parallel with optimizer states, gradients and parameters sharded over the replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strategies.base import Proposal, Space, plans
from toolkit.plans.plan import Job
from toolkit.recipe.axes import OFFLOADS, ZERO_QUANTIZED, ZERO_VARIANTS


@dataclass(frozen=True)
class Zero:
    """DeepSpeed engine with ZeRO 1, 2 or 3."""

    name: str = "zero"
    summary: str = "data parallel with optimizer states (1), gradients (2) and parameters (3) sharded"
    axes: tuple[str, ...] = (
        "dp",
        "zero_stage",
        "zero_group",
        "zero_variant",
        "zero_quantized",
        "offload",
        "micro_batch",
        "grad_accum",
        "recompute",
    )
    needs: str = "one layer's weights and activations on one device; for offload, host memory"
    refuses: str = "offload of parameters below stage 3, MiCS since DeepSpeed 0.19.7, ZeRO++ without CUDA"

    def propose(self, job: Job) -> Iterator[Proposal]:
        """ZeRO 1 to 3, with offload, smaller groups and quantised traffic where they make sense."""
        for stage in (1, 2, 3):
            if job.fixed.get("zero_stage", stage) == stage:
                yield from plans(self.name, job, self._space(stage, job))

    def variants(self, devices: int) -> dict[str, dict[str, Any]]:
        """ZeRO 1 to 3 with and without offload to the host; hpZ if a group can be smaller than all devices."""
        stages: dict[str, dict[str, Any]] = {f"zero-{stage}": {"zero_stage": stage} for stage in (1, 2, 3)}
        offloads = {f"{name}+cpu": {**axes, "offload": "cpu"} for name, axes in stages.items()}
        deepest = {"zero-3+cpu_params": {"zero_stage": 3, "offload": "cpu_params"}}
        groups = (
            {"zero-3+hpz": {"zero_stage": 3, "zero_variant": "hpz", "zero_group": 2}}
            if devices >= 4 and devices % 2 == 0
            else {}
        )
        return {**stages, **offloads, **deepest, **groups}

    def _space(self, stage: int, job: Job) -> Space:
        """The axes to try. Variants need stage 3; below it they are tried, and refused, if the recipe fixes one."""
        asked = job.fixed
        deep = stage == 3
        usual = [o for o in OFFLOADS if o == "none" or _worth_trying(o, job, deep=deep)]
        return Space(
            zero_stage=(stage,),
            offload=OFFLOADS if "offload" in asked else usual,
            zero_variant=ZERO_VARIANTS if "zero_variant" in asked else ("plain", "hpz") if deep else ("plain",),
            zero_quantized=ZERO_QUANTIZED if "zero_quantized" in asked else ("none",),
        )


def _worth_trying(offload: str, job: Job, *, deep: bool) -> bool:
    """Whether to try an offload: not from a CPU to itself, nor to a disk that the cluster does not have."""
    if job.cluster.device.backend == "cpu" or (offload.startswith("nvme") and job.cluster.nvme_bytes == 0):
        return False
    return deep or offload == "cpu"
