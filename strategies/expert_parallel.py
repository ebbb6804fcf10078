"""Expert parallel: experts are distributed over data-parallel ranks; tokens are sent to their experts."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from strategies.base import Proposal, Space, plans
from strategies.legal import expert_sizes, pipeline_sizes, sequence_sizes, tensor_sizes
from toolkit.plans.pipeline_orders import pipeline_zero_stages
from toolkit.plans.plan import Job, Refusal


@dataclass(frozen=True)
class ExpertParallel:
    """Experts in groups of `ep` data-parallel ranks with every ZeRO stage, and inside the stages of a pipeline."""

    name: str = "expert_parallel"
    summary: str = "experts of a mixture-of-experts model distributed over devices; tokens are sent to their experts"
    axes: tuple[str, ...] = (
        "dp", "ep", "pp", "tp", "sp", "zero_stage", "zero_group", "micro_batch", "grad_accum", "recompute",
        "pipeline_bounds",
    )  # fmt: skip
    needs: str = "a mixture-of-experts model whose experts ep divides, and dp that ep divides"
    refuses: str = "dense models; offload; ZeRO 2 and 3 in a pipeline; sizes that do not divide the experts"

    def propose(self, job: Job) -> Iterator[Proposal]:
        """Every legal `ep` with ZeRO 0 to 3 or in a pipeline; with tensor or sequence ranks if the recipe fixes them.

        Tensor ranks compute the same experts, so `tp` never pays off beside `ep`; it is there for models whose other
        weights do not fit.
        """
        if not job.model.experts:
            yield Refusal(self.name, f"{job.model.model_type} has no experts to spread: it is a dense model")
            return
        expert_ranks = yield from _legal(expert_sizes(self.name, job))
        stages = yield from _legal(pipeline_sizes(self.name, job))
        tensor = (yield from _legal(tensor_sizes(self.name, job))) if "tp" in job.fixed else []
        tokens = (yield from _legal(sequence_sizes(self.name, job))) if "sp" in job.fixed else []
        for ep, pp in itertools.product(expert_ranks, [1, *stages]):
            inner = max([1, *tensor]) * max([1, *tokens])
            replicas, left = divmod(job.cluster.devices, pp * inner)
            if left or replicas % ep:
                continue
            staged = pp > 1 and "zero_stage" not in job.fixed
            zero = pipeline_zero_stages(job.workload.precision) if staged else (0, 1, 2, 3)
            space = Space(ep=(ep,), pp=(pp,), tp=tensor or (1,), sp=tokens or (1,), zero_stage=zero)
            yield from plans(self.name, job, space)

    def variants(self, devices: int) -> dict[str, dict[str, Any]]:
        """Two expert-parallel ranks with ZeRO 0 to 3; with four devices also in a pipeline, and with tensor ranks."""
        if devices % 2:
            return {}
        found: dict[str, dict[str, Any]] = {
            f"experts-2+zero-{stage}": {"ep": 2, "pp": 1, "zero_stage": stage} for stage in range(4)
        }
        if devices % 4 == 0:
            found["experts-2xpipeline-2"] = {"ep": 2, "pp": 2, "zero_stage": 1, "grad_accum": 2}
            found["experts-2xtensor-2"] = {"ep": 2, "tp": 2, "pp": 1, "zero_stage": 1}
        return found


def _legal(sizes: Iterator[int | Refusal]) -> Generator[Refusal, None, list[int]]:
    """Yield the refusals among sizes; return the others."""
    found = []
    for size in sizes:
        if isinstance(size, Refusal):
            yield size
        else:
            found.append(size)
    return found
