from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit import collectives as coll
from toolkit.calibration import CALIBRATION, Calibration
from toolkit.cluster import Cluster
from toolkit.estimate import Time
from toolkit.model_spec import ModelSpec
from toolkit.operators import LayerShape, Slice, head_cost, layer_cost
from toolkit.software import Software


@dataclass(frozen=True)
class Repeat:
    """What backward computes again: shares of a layer's forward pass."""

    matmul: float = 0.0
    attention: float = 0.0
    stream: float = 0.0
    comm: float = 0.0
    mlp_up: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Execution:
    model: ModelSpec
    cluster: Cluster
    software: Software
    seq_len: int
    micro_batch: int
    grad_accum: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    cp: int = 1
    zero_stage: int = 0
    zero_group: int = 1
    sequence_shards: bool = False
    repeat: Repeat = Repeat()
    fp8: bool = False
    fp8_gather: bool = False
    power: float = 1.0


def shape_of(m: ModelSpec) -> LayerShape:
    return LayerShape(hidden=m.hidden, heads=m.heads, kv_heads=m.kv_heads, head_dim=m.head_dim, ffn=m.ffn, gated=m.gated_mlp)


def overlap(window: float, comm: float, cal: Calibration) -> float:
    """Seconds that communication adds to a window of compute it runs beside."""
    return max(window, comm) + cal.interference * min(window, comm) - window


def seconds(e: Execution, cal: Calibration = CALIBRATION) -> Time:
    m, cl, sw = e.model, e.cluster, e.software
    dev = cl.device
    part = Slice(micro_batch=e.micro_batch, seq_len=e.seq_len, parts=e.cp, tp=e.tp, residual_parts=e.tp if e.sequence_shards else 1, fp8=e.fp8)
    c = layer_cost(shape_of(m), part, dev, sw, cal)
    f, b = c.forward, c.backward
    fwd_dev = f.matmul + f.attention + f.stream
    bwd_dev = b.matmul + b.attention + b.stream
    r = e.repeat
    rep_dev = r.matmul * f.matmul + r.attention * f.attention + r.stream * f.stream + r.mlp_up * f.mlp_matmul
    host = f.kernels * cal.launch_seconds
    fwd = max(fwd_dev, host)
    bwd = max(bwd_dev, host * 2)
    rep = max(rep_dev, host * max(r.matmul, r.stream))
    # tensor parallel
    tp_f = tp_b = tp_r = 0.0
    if e.tp > 1:
        g = coll.group(cl, e.tp, 1)
        size = 2.0 * part.tokens * m.hidden
        one = 2 * coll.gather(size, g, cl, cal) if e.sequence_shards else coll.all_reduce(size, g, cl, cal)
        share = cal.tp_exposed if sw.tp_overlap else 1.0
        tp_f = 2 * one * share
        tp_b = tp_f * (1.25 if e.sequence_shards else 1.0)
        tp_r = r.comm * tp_f
    # context parallel ring
    cp_t = 0.0
    if e.cp > 1:
        g = coll.group(cl, e.cp, e.tp)
        kv = 2 * 2.0 * part.tokens * m.kv_heads * m.head_dim / e.tp
        ring = coll.gather(kv * e.cp, g, cl, cal)
        cp_t = overlap(f.attention, ring, cal) * (1 + r.attention) + overlap(b.attention, 2 * ring, cal)
    layers = m.layers
    per_stage = math.ceil(layers / e.pp)
    # ZeRO 3 traffic of each layer
    z3 = 0.0
    layer_params = sum(m.layer_params) / layers / e.tp
    dpg = coll.group(cl, e.zero_group, e.tp)
    wb = 1.0 if e.fp8_gather else 2.0
    if e.zero_stage == 3 and e.zero_group > 1 and e.pp == 1:
        ag = coll.gather(wb * layer_params, dpg, cl, cal)
        rs = coll.gather(sw.grad_bytes * layer_params, dpg, cl, cal)
        z3 = overlap(fwd + tp_f, ag, cal) + overlap(bwd + rep + tp_b + tp_r, ag + rs, cal)
    hf, hb = head_cost(m.hidden, m.vocab, part, dev, sw, cal)
    head = hf + hb
    layer = fwd + bwd + rep
    comm = tp_f + tp_b + tp_r + cp_t + z3
    stage_mean = (layers * (layer + comm) + head) / e.pp
    stage_max = per_stage * (layer + comm) + (head if e.pp > 1 and per_stage * e.pp < layers + 1 else head)
    if e.pp > 1:
        # the last stage holds the head; a short last stage has room for it
        last = layers - per_stage * (e.pp - 1) if layers - per_stage * (e.pp - 1) > 0 else layers / e.pp
        stage_max = max(per_stage * (layer + comm), last * (layer + comm) + head)
    else:
        stage_max = stage_mean
    n = e.grad_accum
    busy = n * stage_max
    bubble = (e.pp * stage_mean - stage_max) / e.chunks if e.pp > 1 else 0.0
    p2p = 0.0
    if e.pp > 1:
        stride = cl.devices / e.pp
        inter = stride >= cl.devices_per_node
        bw = cl.inter_bytes_per_second * cal.inter if inter else cl.intra_bytes_per_second * cal.intra
        size = 2.0 * part.tokens * m.hidden / (e.tp if e.sequence_shards or e.chunks > 1 else 1)
        one = size / bw + 15e-6
        share = cal.interference if sw.pp_overlap else cal.pp_exposed
        p2p = (n + (e.pp - 1) / e.chunks) * 2 * e.chunks * one * share
    # data parallel
    stage_params = (per_stage * layer_params + (m.vocab * m.hidden / e.tp if e.pp > 1 else (m.embedding_params + m.head_params) / e.tp))
    dp_comm = 0.0
    if e.dp > 1 or e.cp > 1:
        dpc = e.dp * e.cp
        full = coll.group(cl, dpc, e.tp)
        gb = sw.grad_bytes
        win_b, win_f = per_stage * bwd + hb, per_stage * fwd
        if e.zero_stage == 3 and e.pp == 1:
            if dpc > e.zero_group:
                ratio = dpc // e.zero_group
                gg = coll.Group(ratio, max(1, full.per_node // e.zero_group))
                t = coll.all_reduce(gb * stage_params / e.zero_group, gg, cl, cal)
                dp_comm = overlap(win_b, t, cal)
        elif e.zero_stage == 0:
            t = coll.all_reduce(gb * stage_params, full, cl, cal)
            dp_comm = overlap(win_b, t, cal) if sw.dp_overlap else t
        else:
            if e.zero_group < dpc:
                t1 = coll.all_reduce(gb * stage_params, full, cl, cal)
                t2 = coll.gather(2.0 * stage_params, dpg, cl, cal)
            else:
                t1 = coll.gather(gb * stage_params, full, cl, cal)
                t2 = coll.gather(2.0 * stage_params, full, cl, cal)
            dp_comm = overlap(win_b, t1, cal) + overlap(win_f, t2, cal) if sw.dp_overlap else t1 + t2
    shard = e.zero_group if e.zero_stage else 1
    optim = 30.0 * stage_params / shard / (dev.memory_bytes_per_second * cal.stream)
    if n > 1 and e.zero_stage < 3:
        optim += (n - 1) * (3 * sw.grad_bytes * stage_params) / (dev.memory_bytes_per_second * cal.stream)
    scale_tp = n * per_stage
    return Time(
        compute=n * (per_stage * (fwd + bwd) + (stage_max - per_stage * (layer + comm))) if e.pp > 1 else n * (layers * (fwd + bwd) + head),
        recompute=scale_tp * rep,
        tp_comm=scale_tp * (tp_f + tp_b + tp_r),
        sp_comm=scale_tp * cp_t,
        pp_bubble=bubble,
        pp_comm=p2p,
        dp_comm=scale_tp * z3 + dp_comm,
        optimizer=optim,
        fixed=cal.fixed_seconds,
    )
