"""Exposed communication per step by axis, and the time of each collective."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.clusters.cluster import Cluster
from toolkit.cost.calibration import Calibration
from toolkit.cost.execution import Execution, expert_params, routed_expert_params
from toolkit.cost.operators import LayerCost
from toolkit.plans.deepspeed_config import MAX_LIVE_ELEMENTS
from toolkit.plans.exchange import bytes_per_number

BACKWARD_GATHER = 1.25
"""Backward relative to forward traffic with sharded residuals: inputs are gathered again for the weight gradient."""


@dataclass(frozen=True)
class Window:
    """Seconds of compute of one micro-batch on one stage that communication can overlap with."""

    forward: float
    backward: float


def exposed(window: float, comm: float, cal: Calibration, where: Group | None = None) -> float:
    """Seconds that communication adds to overlapped compute: what exceeds it, and how much it slows compute down.

    Traffic between nodes moves at a fraction of the memory bandwidth and so slows compute down less."""
    slowed = cal.interference if where is None or where.nodes == 1 else cal.network_interference
    return max(window, comm) + slowed * min(window, comm) - window


def tensor_seconds(e: Execution, cal: Calibration) -> tuple[float, float]:
    """Tensor parallel, forward and backward: two all-reduces (or gather and scatter pairs) per layer and pass."""
    if e.tp == 1:
        return 0.0, 0.0
    where = group(e.cluster, e.tp, 1)
    size = e.element_bytes * e.slice.tokens * e.model.hidden
    narrow = 0.5 if e.fp8 and e.software.tp_overlap else 1.0  # Transformer Engine gathers in 8 bits
    pair = gather(size * narrow, where, e.cluster, cal) + gather(size, where, e.cluster, cal)
    one = pair if e.residual_shards else all_reduce(size, where, e.cluster, cal)
    forward = 2 * one * (min(1.0, 1 / e.tp + cal.tp_exposed) if e.software.tp_overlap else 1.0)
    return forward, forward * (BACKWARD_GATHER if e.residual_shards else 1.0)


def sequence_seconds(e: Execution, cost: LayerCost, cal: Calibration) -> float:
    """Both passes of a layer: ring context parallel (overlapped with attention) and Ulysses (exchanges around it)."""
    model, tokens = e.model, e.slice.tokens
    total = 0.0
    if e.cp > 1:
        where = group(e.cluster, e.cp, e.tp * e.sp)
        keys = 2 * e.element_bytes * tokens * model.kv_heads * model.head_dim / e.tp
        ring = gather(keys * e.cp, where, e.cluster, cal)
        again = 1 + e.recompute.attention
        total += exposed(cost.forward.attention, ring, cal, where) * again
        back = 3 if e.drops_gradients and e.element_bytes == 2 else 2  # gradients travel in fp32
        total += exposed(cost.backward.attention, back * ring, cal, where)
    if e.sp > 1:
        where = group(e.cluster, e.sp, e.tp)
        heads = (2 * model.heads + 2 * max(model.kv_heads, e.sp)) * model.head_dim / e.tp
        one = all_to_all(e.element_bytes * tokens * heads / 4, where, e.cluster, cal)
        total += 4 * one * (2 + e.recompute.traffic)
    return total


def layer_seconds(e: Execution, forward: float, backward: float, cal: Calibration) -> float:
    """ZeRO 3, per layer and micro-batch: gather in the forward pass, gather and reduce in the backward pass."""
    if e.zero_stage < 3 or e.replicas == 1 or e.pp > 1:
        return 0.0
    experts = expert_params(e) / e.model.layers
    params = (e.mean_layer_params - experts) / e.tp + experts / e.ep / e.expert_cut
    messages = e.software.zero_messages + expert_tensors(e)
    everyone, shard = _groups(e)
    wide = everyone if e.zero_variant == "hpz" else shard
    weights = e.element_bytes * e.weight_wire * (0.5 if e.software.fp8_gather else 1.0) * params
    grads = _grad_bytes(e) * params * e.trained_share
    copied = COPIED / (e.cluster.device.memory_bytes_per_second * cal.stream) if e.software.zero_copies else 0.0
    first = gather(weights, wide, e.cluster, cal, messages) + copied * weights
    again = gather(weights, shard, e.cluster, cal, messages) + copied * weights
    reduced = gather(grads, wide, e.cluster, cal, messages) + copied * grads
    if not e.software.dp_overlap:
        return first + again + reduced
    edges = (first + again + reduced) / e.model.layers  # first gather and last reduction: nothing to overlap with
    if routed_expert_params(e) / e.ep / e.expert_cut > MAX_LIVE_ELEMENTS and e.drops_gradients:
        late = _late_gathers(e, (first, again), (forward, backward), cal, wide)
        return late + exposed(backward, reduced, cal, wide) + edges
    return exposed(forward, first, cal, wide) + exposed(backward, again + reduced, cal, wide) + edges


def _late_gathers(
    e: Execution, gathers: tuple[float, float], passes: tuple[float, float], cal: Calibration, where: Group
) -> float:
    """Exposed seconds of gathers of layers whose experts are more than ZeRO 3's limit of gathered parameters.

    DeepSpeed 0.19.8 then gathers nothing ahead while experts compute, and of the next experts one tensor of two: gate
    and up (`PartitionedParameterCoordinator.fetch_sub_module`)."""
    routed = routed_expert_params(e) / e.model.experts * e.model.experts_per_token
    mixed = e.model.moe_layers / e.model.layers
    beside = 1 - mixed * routed / max(e.model.layer_active_params)
    ahead = 1 - mixed / (3 if e.model.gated_mlp else 2)
    return sum(
        exposed(beside * window, ahead * each, cal, where) + (1 - ahead) * each
        for each, window in zip(gathers, passes, strict=True)
    )


EXPERT_TENSORS = 3
"""Matrices of an expert, each fetched by itself where experts are modules of their own."""


def expert_tensors(e: Execution) -> int:
    """Tensors of experts that ZeRO 3 fetches one by one per layer, because they run one after the other."""
    if not e.software.expert_loop or not e.software.zero_copies or not e.model.experts:
        return 0
    return round(EXPERT_TENSORS * e.model.experts / e.ep * e.model.moe_layers / e.model.layers)


def step_seconds(e: Execution, window: Window, cal: Calibration) -> float:
    """Gradients and parameters sent once per step, or gradients after every micro-batch (ZeRO 2)."""
    total = _replica_seconds(e, window, cal) if e.replicas > 1 else 0.0
    return total + _island_seconds(e, window, cal)


def stage_params(e: Execution) -> float:
    """Parameters of the fullest pipeline stage on one tensor-parallel rank; experts are distributed over `ep` ranks."""
    experts = expert_params(e)
    own = experts / e.ep / e.expert_cut
    if e.pp == 1:
        return (e.model_params - experts) / e.tp + own
    table = max(e.model.embedding_params, e.model.head_params, e.model.vocab * e.model.hidden)
    part = e.layers_per_stage / e.model.layers
    return (e.layers_per_stage * e.mean_layer_params + table - part * experts) / e.tp + part * own


def pipeline_seconds(e: Execution, cal: Calibration) -> float:
    """Activations and their gradients between stages, per chunk and micro-batch.

    Without overlap, a stage waits for what it sends and for what it receives.
    """
    if e.pp == 1:
        return 0.0
    per_stage = e.cluster.devices // e.islands // e.pp
    size = _message_bytes(e)
    # A pipeline is as fast as its slowest transfer: if it spans nodes, that is one between them.
    one = send(size, between_nodes=per_stage * e.pp > e.cluster.devices_per_node, cluster=e.cluster, cal=cal)
    rounds = (e.grad_accum + (e.pp - 1) / e.chunks) * 2 * e.chunks
    seconds = rounds * one * (cal.interference if e.software.pp_overlap else cal.pipeline_waits)
    return seconds + _between_sites(e, size, per_stage, rounds / e.chunks)


def _message_bytes(e: Execution) -> float:
    """What a rank sends to the next stage for a micro-batch: complete activations, or a tensor rank's share."""
    scattered = e.residual_shards or e.chunks > 1 or e.software.scattered_sends
    return e.crossing * e.element_bytes * e.slice.tokens * e.model.hidden / (e.tp if scattered else 1)


def _between_sites(e: Execution, size: float, per_stage: int, rounds: float) -> float:
    """Seconds per step of the stages on both sides of a link between sites, which all ranks of a stage share."""
    cluster = e.cluster
    if cluster.sites == 1 or e.islands >= cluster.sites or per_stage >= cluster.devices_per_site:
        return 0.0
    if cluster.site_bytes_per_second <= 0:
        return math.inf
    crossings = e.chunks if e.chunks > 1 else 1
    each = per_stage * size / cluster.site_bytes_per_second + cluster.site_latency_seconds
    return rounds * crossings * each


def _groups(e: Execution) -> tuple[Group, Group]:
    """All replicas, and those that hold one full set of sharded states."""
    everyone = group(e.cluster, e.replicas, e.tp)
    return everyone, group(e.cluster, min(e.zero_group, e.replicas), e.tp)


def _grad_bytes(e: Execution) -> float:
    return (4 if e.element_bytes == 4 else e.software.grad_bytes) * e.grad_wire


def _replica_seconds(e: Execution, window: Window, cal: Calibration) -> float:
    everyone, shard = _groups(e)
    params = _reduced_params(e)
    grads = _grad_bytes(e) * params * e.trained_share
    weights = e.element_bytes * params * e.trained_share
    if e.zero_stage == 3 and e.pp == 1:
        return _between_groups(e, grads, window, cal)
    if e.zero_stage == 0:
        collective = hierarchical if e.hierarchical else all_reduce
        reduce, collect = collective(grads, everyone, e.cluster, cal), 0.0
    elif e.zero_group < e.replicas:
        reduce = all_reduce(grads, everyone, e.cluster, cal)
        collect = gather(weights, shard, e.cluster, cal, buckets(weights))
    else:
        # DeepSpeed's BF16_Optimizer all-reduces, as every rank takes the norm of all gradients.
        twice = 2 if e.accumulates_apart else 1
        reduce = twice * gather(grads, everyone, e.cluster, cal, buckets(grads))
        collect = gather(weights, everyone, e.cluster, cal, buckets(weights))
    rounds = e.grad_accum if e.reduces_every_micro_batch else 1
    if not e.software.dp_overlap:
        return rounds * reduce + collect
    return rounds * exposed(window.backward, reduce, cal, everyone) + exposed(window.forward, collect, cal, everyone)


def _reduced_params(e: Execution) -> float:
    """Parameters whose gradients are reduced, as if all were reduced over all replicas.

    Experts are reduced over the dp / ep ranks that hold the same ones."""
    own = stage_params(e)
    if e.ep == 1 or e.replicas == 1:
        return own
    experts = expert_params(e) / e.ep / (e.expert_cut * e.pp)
    copies = max(1, e.replicas // e.ep)
    return own - experts + experts * ((copies - 1) / copies) / ((e.replicas - 1) / e.replicas)


def _between_groups(e: Execution, grads: float, window: Window, cal: Calibration) -> float:
    """ZeRO 3 in groups smaller than all replicas: the groups all-reduce their shards."""
    if e.zero_variant == "hpz" or e.zero_group >= e.replicas:
        return 0.0
    copies = e.replicas // e.zero_group
    stride = e.tp * e.zero_group
    where = group(e.cluster, copies, stride)
    one = all_reduce(grads / e.zero_group, where, e.cluster, cal)
    return exposed(window.backward, one, cal, where) if e.software.dp_overlap else one


def _island_seconds(e: Execution, window: Window, cal: Calibration) -> float:
    """The exchange between islands: blocking, or overlapped with the steps until its mean is applied."""
    if e.islands == 1:
        return 0.0
    where = group(e.cluster, e.islands, e.cluster.devices // e.islands)
    size = stage_params(e) * e.trained_share / e.dp  # the ranks of an island share the work
    step = e.grad_accum * (window.forward + window.backward)
    rhythm = e.exchange.first()
    if e.exchange.adapts and step > 0:
        rhythm = e.exchange.chosen(all_reduce(4 * size, where, e.cluster, cal), step)
    one = bytes_per_number(rhythm.bits, e.exchange.density) * size / rhythm.fragments
    seconds = all_reduce(one, where, e.cluster, cal)
    if e.exchange.hidden:
        seconds = exposed(rhythm.delay_steps * step, seconds, cal, where)
    return seconds * rhythm.fragments / rhythm.local_steps


def traffic_bytes(e: Execution) -> dict[str, float]:
    """Bytes per step by axis that the seconds above are of, for one device.

    Of a collective its size counts: what is reduced, exchanged or has been gathered. Of a pipeline, what a stage sends
    to one neighbour and receives from it. Collectives of the loss and of norms are left out, as in the seconds.
    """
    again, passes = e.recompute.traffic, e.layers_per_stage * e.grad_accum
    hidden = e.element_bytes * e.slice.tokens * e.model.hidden
    heads = (2 * e.model.heads + 2 * max(e.model.kv_heads, e.sp)) * e.model.head_dim / e.tp
    visits = passes * e.model.moe_layers / e.model.layers * e.model.experts_per_token * e.expert_slots
    reduced = 2 * (2 + again)  # all-reduces per layer
    if e.residual_shards:  # gathers and reduce-scatters; a repetition ends before the last of them
        reduced = 10 + 3 * math.ceil(again)
    return {
        "ep": visits * 2 * hidden * (2 + e.recompute.exchanged) if e.ep > 1 else 0.0,
        "tp": passes * reduced * hidden if e.tp > 1 else 0.0,
        "sp": passes * e.element_bytes * e.slice.tokens * heads * (2 + again) if e.sp > 1 else 0.0,
        "cp": _ring_bytes(e) * passes if e.cp > 1 else 0.0,
        "pp": 2 * e.grad_accum * _message_bytes(e) if e.pp > 1 else 0.0,
        "dp": _replica_bytes(e) if e.replicas > 1 else 0.0,
    }


def _ring_bytes(e: Execution) -> float:
    """Bytes per layer that a ring rank sends to its neighbour and receives from the other one."""
    keys = 2 * e.slice.tokens * max(e.model.kv_heads, e.sp) * e.model.head_dim / e.tp
    rounds = (e.cp - 1) * (2 + e.recompute.attention)
    return 2 * keys * (rounds * e.element_bytes + e.cp * 4)


def _replica_bytes(e: Execution) -> float:
    """Bytes per step of gradients and weights between replicas."""
    params = _reduced_params(e)
    grads, weights = _grad_bytes(e) * params * e.trained_share, e.element_bytes * params
    rounds = e.grad_accum if e.reduces_every_micro_batch else 1
    if e.zero_stage == 3 and e.pp == 1:
        return e.grad_accum * (2 * e.weight_wire * weights + grads)
    return rounds * grads + (weights * e.trained_share if e.zero_stage else 0.0)


COPIED = 2.0
"""Bytes read and written per byte that DeepSpeed's ZeRO 3 copies from a flat buffer, or into one."""
IN_SWITCH_GAIN = 1.3
"""Speed-up of an all-reduce by reduction in the switch: 480 / 366 GB/s on H100, 473 / 366 on H200 (ml-engineering)."""
BUCKET_BYTES = 500e6
"""Large transfers are cut into buckets of about this size, each with its own start-up (DeepSpeed's default)."""


@dataclass(frozen=True)
class Group:
    """Placement of the ranks of one collective."""

    ranks: int
    per_node: int
    """Ranks of the group on one node."""
    sites: int = 1
    """Sites that the group spans."""

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return max(1, math.ceil(self.ranks / self.per_node))


def group(cluster: Cluster, ranks: int, stride: int) -> Group:
    """The group of `ranks` ranks that are `stride` devices apart."""
    per_node = cluster.devices_per_node // max(1, stride)
    sites = math.ceil(ranks * stride / cluster.devices_per_site) if cluster.sites > 1 else 1
    return Group(ranks, max(1, min(ranks, per_node)), min(ranks, sites))


def all_reduce(size: float, where: Group, cluster: Cluster, cal: Calibration) -> float:
    """Seconds of an all-reduce of `size` bytes."""
    if where.ranks <= 1 or size <= 0:
        return 0.0
    switch = cluster.device.in_switch_reduction and where.nodes == 1 and where.ranks >= 8
    rate = bandwidth(where, cluster, cal) * (IN_SWITCH_GAIN if switch else 1.0)
    return _startup(where, cluster, cal) + _transfer(2.0 * (where.ranks - 1) / where.ranks, size, rate, cal)


def hierarchical(size: float, where: Group, cluster: Cluster, cal: Calibration) -> float:
    """Seconds of a hierarchical all-reduce: reduce-scatter inside nodes, shards between nodes, all-gather inside."""
    inside = Group(where.per_node, where.per_node)
    between = Group(where.nodes, 1, where.sites)
    shards = all_reduce(size / where.per_node, between, cluster, cal)
    return 2 * gather(size, inside, cluster, cal) + shards


def gather(size: float, where: Group, cluster: Cluster, cal: Calibration, messages: int = 1) -> float:
    """Seconds of an all-gather or reduce-scatter of `size` bytes in total, as a ring."""
    if where.ranks <= 1 or size <= 0:
        return 0.0
    hops = messages * (where.ranks - 1) * cal.ring_hop * cluster.inter_latency_seconds if where.nodes > 1 else 0.0
    wire = (where.ranks - 1) / where.ranks
    startup = messages * _startup(where, cluster, cal)
    return startup + hops + _transfer(wire, size, bandwidth(where, cluster, cal), cal)


def buckets(size: float) -> int:
    """Number of messages that a large transfer is cut into."""
    return max(1, round(size / BUCKET_BYTES))


def all_to_all(size: float, where: Group, cluster: Cluster, cal: Calibration, outside_share: float = 1.0) -> float:
    """Seconds of an all-to-all: every rank sends an equal part of its `size` bytes to every other rank.

    `outside_share` of what goes to other nodes uses the network, where a node gets only one copy of a token.
    """
    if where.ranks <= 1 or size <= 0:
        return 0.0
    inside = (where.per_node - 1) / where.ranks * size / (cluster.intra_bytes_per_second * cal.intra)
    leaving = (where.ranks - where.per_node) / where.ranks * size * outside_share
    outside = leaving / (cluster.inter_bytes_per_second * cal.inter) if leaving else 0.0
    if where.sites > 1:
        crossing = leaving * where.ranks / where.sites * (1 - 1 / where.sites)
        outside = max(outside, crossing / cluster.site_bytes_per_second if cluster.site_bytes_per_second else math.inf)
    return _startup(where, cluster, cal) + inside + outside


def send(size: float, *, between_nodes: bool, cluster: Cluster, cal: Calibration) -> float:
    """Seconds to send `size` bytes from one rank to another."""
    if between_nodes:
        return cluster.inter_latency_seconds / 2 + size / (cluster.inter_bytes_per_second * cal.inter)
    return cluster.latency_seconds / 2 + size / (cluster.intra_bytes_per_second * cal.intra)


def bandwidth(where: Group, cluster: Cluster, cal: Calibration) -> float:
    """Bytes per second on the slowest part of the ring: links inside a node, or the group's share of the NICs."""
    inside = cluster.intra_bytes_per_second * cal.intra
    if where.nodes == 1:
        return inside
    between = min(inside, where.per_node * cluster.inter_bytes_per_second * cal.inter)
    if where.sites == 1:
        return between
    return min(between, where.ranks / where.sites * cluster.site_bytes_per_second / cluster.devices_per_site)


def _startup(where: Group, cluster: Cluster, cal: Calibration) -> float:
    if where.nodes == 1:
        return cal.rank_latency * where.ranks * cluster.latency_seconds
    between = cluster.inter_latency_seconds * (1.0 + cal.node_latency * math.log2(where.nodes / 2))
    return between + (cluster.site_latency_seconds if where.sites > 1 else 0.0)


def _transfer(wire: float, size: float, rate: float, cal: Calibration) -> float:
    """Seconds on the wire; short messages do not reach the full rate."""
    if rate <= 0:
        return math.inf
    half = cal.ramp_seconds * rate
    return wire * (size + half * (1.0 - math.exp(-size / half))) / rate
