"""Sizes of each model-parallel axis that a model allows, and refusals with the reason for the others."""

from __future__ import annotations

from collections.abc import Iterator

from strategies.base import divisors
from toolkit.plans.pipeline_bounds import bounds_problem
from toolkit.plans.plan import Job, Refusal
from toolkit.plans.token_shares import why_whole

NODES_OF_TENSOR_PARALLEL = 2
"""Tensor parallelism across more nodes than this never pays off."""


def tensor_sizes(strategy: str, job: Job) -> Iterator[int | Refusal]:
    """Sizes of `tp` above 1: must divide query heads and MLP width, and divide or be a multiple of key/value heads."""
    model = job.model
    widest = NODES_OF_TENSOR_PARALLEL * job.cluster.devices_per_node
    for tp in _asked(job, "tp", [size for size in divisors(job.cluster.devices) if 1 < size <= widest]):
        if model.heads % tp:
            yield Refusal(strategy, f"tp {tp} does not divide the {model.heads} attention heads")
        elif model.kv_heads % tp and tp % model.kv_heads:
            yield Refusal(strategy, f"tp {tp} does not fit the {model.kv_heads} key/value heads")
        elif model.ffn % tp:
            yield Refusal(strategy, f"tp {tp} does not divide the MLP width {model.ffn}")
        else:
            yield tp


def pipeline_sizes(strategy: str, job: Job) -> Iterator[int | Refusal]:
    """Sizes of `pp` above 1: every stage needs a layer."""
    given = job.fixed.get("pipeline_bounds")
    for pp in _asked(job, "pp", [size for size in divisors(job.cluster.devices) if size > 1]):
        if pp > job.model.layers:
            yield Refusal(strategy, f"{pp} stages need at least {pp} layers; the model has {job.model.layers}")
        elif given and (problem := bounds_problem(given, job.model.layers, pp)):
            yield Refusal(strategy, f"strategy.pipeline_bounds: {problem}")
        else:
            yield pp


def sequence_sizes(strategy: str, job: Job) -> Iterator[int | Refusal]:
    """Sizes of `sp` above 1: must divide attention heads and tokens, which are exchanged in equal parts."""
    model, tokens = job.model, job.workload.seq_len
    for sp in _asked(job, "sp", [size for size in divisors(job.cluster.devices) if 1 < size <= model.heads]):
        if model.heads % sp:
            yield Refusal(strategy, f"sp {sp} does not divide the {model.heads} attention heads")
        elif tokens % sp:
            yield Refusal(strategy, f"sp {sp} does not divide sequences of {tokens} tokens")
        else:
            yield sp


LEAST_RING_TOKENS = 2048
"""Tokens of a ring rank below which passing keys and values on takes longer than attention."""


def ring_sizes(strategy: str, job: Job, sp: int) -> Iterator[int | Refusal]:
    """Sizes of `cp` above 1 beside `sp` ranks: every rank holds two chunks of a sequence."""
    tokens = job.workload.seq_len
    usual = [size for size in divisors(job.cluster.devices // sp) if 1 < size <= tokens // sp // LEAST_RING_TOKENS]
    for cp in _asked(job, "cp", usual):
        if tokens % (2 * cp * sp):
            unit = 2 * cp * sp
            near = tokens // unit * unit or unit
            what = f"2·cp·sp = {unit} does not divide sequences of {tokens} tokens; use data.seq_len {near}"
            yield Refusal(strategy, f"cp {cp}: {what}")
        else:
            yield cp


def expert_sizes(strategy: str, job: Job) -> Iterator[int | Refusal]:
    """Sizes of `ep` above 1: every rank gets the same number of experts."""
    for ep in _asked(job, "ep", [size for size in divisors(job.cluster.devices) if 1 < size <= job.model.experts]):
        if job.model.experts % ep:
            yield Refusal(strategy, f"ep {ep} does not divide the {job.model.experts} experts")
        else:
            yield ep


def token_shares(strategy: str, job: Job, tp: int, parts: int = 1) -> tuple[bool] | Refusal:
    """Values of `sequence_sharded` to try: shares of tokens wherever they are possible, unless the recipe says no."""
    fixed = job.fixed.get("sequence_sharded")
    if tp == 1 or fixed is False:
        return (False,)
    reason = why_whole(job, tp, parts)
    if fixed and reason:
        return Refusal(strategy, f"strategy.sequence_sharded is fixed at true; {reason}")
    return (not reason,)


def _asked(job: Job, axis: str, usual: list[int]) -> list[int]:
    """The size that the recipe fixes, if it is above 1; without a fixed size, the usual ones."""
    fixed = job.fixed.get(axis)
    if fixed is None:
        return usual
    return [fixed] if fixed > 1 else []
