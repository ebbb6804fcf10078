"""Sizes of each model-parallel axis that a model allows, and refusals with the reason for the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from strategies.base import divisors
from toolkit.plans.pipeline_bounds import bounds_problem
from toolkit.plans.pipeline_orders import V_CHUNKS
from toolkit.plans.plan import Job, Refusal
from toolkit.plans.token_shares import why_whole

MOST_CHUNKS = 8
"""Largest number of chunks per pipeline rank that is tried unless the recipe fixes one."""
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
    given, chunks = job.fixed.get("pipeline_bounds"), job.fixed.get("chunks", 1)
    for pp in _asked(job, "pp", [size for size in divisors(job.cluster.devices) if size > 1]):
        if pp > job.model.layers:
            yield Refusal(strategy, f"{pp} stages need at least {pp} layers; the model has {job.model.layers}")
        elif pp * chunks > job.model.layers:
            yield Refusal(
                strategy, f"{pp} ranks × {chunks} chunks need as many layers; the model has {job.model.layers}"
            )
        elif given and (problem := bounds_problem(given, job.model.layers, pp * _chunks_of_bounds(job, pp))):
            yield Refusal(strategy, f"strategy.pipeline_bounds: {problem}")
        else:
            yield pp


def schedules(job: Job, pp: int, tp: int = 1) -> Iterator[dict[str, Any]]:
    """Schedules of a pipeline to try, as axes of a `Space`: those that the recipe fixes, or a few that may pay off.

    More chunks make the bubble smaller and traffic larger; beyond `MOST_CHUNKS` mostly the traffic grows. A zero-bubble
    schedule keeps all activations: beside tensor shards, which large models have to save memory, it is tried only if
    the recipe asks for it.
    """
    if pp == 1:
        yield {}
        return
    layers, fixed = job.model.layers, job.fixed
    given = fixed.get("chunks") or (_chunks_of_bounds(job, pp) if "pipeline_bounds" in fixed else None)
    even = [chunks for chunks in divisors(layers) if 1 < chunks <= MOST_CHUNKS] or [2]  # as in `chunks_problem`
    usual = [chunks for chunks in even if pp * chunks <= layers]
    found = [("1f1b", 1), *(("interleaved", chunks) for chunks in ([given] if given else usual))]
    asked = fixed.get("schedule") == "zero_bubble"
    if V_CHUNKS * pp <= layers and (tp == 1 or asked):
        found.append(("zero_bubble", V_CHUNKS))
    for name, chunks in found:
        fits = chunks > 1 or name == "1f1b"
        if fits and fixed.get("schedule", name) == name and given in (None, chunks):
            limits = {"recompute": ("none",)} if name == "zero_bubble" and "recompute" not in fixed else {}
            yield {"schedule": (name,), "chunks": (chunks,), **limits}


def _chunks_of_bounds(job: Job, pp: int) -> int:
    """Chunks per rank that the recipe's stage bounds make; 1 if they fit no number of them."""
    stages = len(job.fixed["pipeline_bounds"]) - 1
    if "chunks" in job.fixed:
        return int(job.fixed["chunks"])
    return stages // pp if stages % pp == 0 and stages else 1


def offloads(job: Job) -> tuple[str, ...]:
    """Offload of model-parallel plans: tried only if the recipe asks for it, as more ranks hold more states instead."""
    return (job.fixed.get("offload", "none"),)


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
