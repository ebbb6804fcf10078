"""Published measurements: turn a row of a CSV file into an execution, or a reason why it can't be scored."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from toolkit.clusters.cluster import Cluster
from toolkit.clusters.devices import Device, find_device
from toolkit.cost.activations import LOGIT_BYTES
from toolkit.cost.calibration import Calibration
from toolkit.cost.estimate import DEVICE_SHARE
from toolkit.cost.execution import QUANTIZED_BYTES, RECOMPUTE, Execution, Recompute
from toolkit.cost.memory import device_bytes
from toolkit.cost.optimizer_step import state_shards
from toolkit.cost.published_rows import MISSING, NO, YES, NotScorable, PublishedRow
from toolkit.cost.software import Software, software_of
from toolkit.models.spec import ModelSpec
from toolkit.units import GB, GBIT, TERA

CHECKPOINTING = (
    (r"unknown|\?", Recompute()),
    (r"whole moe", Recompute(0.6, 0, 1, 0, kept=0.2)),
    (r"moe_act", Recompute(stream=0.5, kept=0.4)),
    (r"selective_?op", Recompute(0.5, 0, 1, 0.5, kept=0.4)),
    (r"selective_?layer_?2|every.?(2|second)", Recompute(0.5, 0.5, 0.5, 0.5, kept=0.5)),
    (r"mlp", Recompute(stream=1, mlp_up=1, kept=0.25)),
    (r"qkv|out_?proj", Recompute(attention=1, stream=1, mlp_up=1, kept=0.15)),
    (r"dot", Recompute(attention=1, stream=1, kept=0.5)),
    (r"selective|attention|attn|core", RECOMPUTE["selective"]),
    (r"full|^1$|true|yes|layer|block|uniform", RECOMPUTE["full"]),
)
"""Patterns for the activation-checkpointing cell; the first match counts, and no match means no recompute."""
GATED_FAMILIES = re.compile(r"llama|mistral|mixtral|qwen|gemma|internlm|deepseek|olmo|yi-")
"""Model names that imply a gated MLP if the column is empty."""
PCIE_GB_PER_SECOND = {"3": 12, "4": 25, "5": 50}
"""Bandwidth of a PCIe generation between two devices of a node, in one direction."""
LATENT = r"MLA \(q_lora (\d+), kv_lora (\d+), qk (\d+)\+(\d+), v (\d+)\)"
"""How a row describes latent attention: ranks, width of keys without and with rotation, width of values."""
WINDOWS = {"gpt-oss": (128, 2), "gemma3": (1024, 6), "gemma-3": (1024, 6), "gemma2": (4096, 2), "gemma-2": (4096, 2)}
"""Families with sliding windows: tokens of the window, and that one layer in so many sees the full sequence."""
BLACKWELL_FLOPS = 1e13
"""Peak per multiprocessor above which a device is a Blackwell; Megatron-Bridge's recipes for it use CUDA graphs."""
LARGEST_LINK_DOMAIN = 64
"""Ranks of a job inside an NVL72 domain: the largest power of two up to 72."""


def execution_of(row: PublishedRow) -> Execution:
    """The execution that a row describes; raises `NotScorable` if it states too little."""
    device = _device(row)
    cluster = _cluster(row, device)
    tp, pp, cp = row.count("tp"), row.count("pp"), row.count("cp")
    dp = row.count("dp", max(1, cluster_size(row) // (tp * pp * cp)))
    ulysses = "ulysses" in row.text("cp_kind").lower()
    micro_batch, grad_accum = _batches(row, dp, pp)
    stage = int(row.number_of("zero_stage") or 0)
    schedule = row.text("pp_schedule").lower()
    return Execution(
        model=model_of(row), cluster=cluster, seq_len=_needed(row, "seq_len"), micro_batch=micro_batch,
        grad_accum=grad_accum, dp=dp, tp=tp, pp=pp, cp=1 if ulysses else cp, sp=cp if ulysses else 1,
        ep=min(row.count("ep"), row.count("n_experts")), software=_software(row, device, pp, stage),
        expert_tp=row.count("etp") if row.count("n_experts", 0) else 0,
        chunks=row.count("vpp", 2 if "interleav" in schedule else 1), bubble_share=_bubble_share(schedule),
        zero_stage=min(3, stage), zero_group=row.count("shard_group", dp * cp if stage else 1),
        residual_shards=tp > 1 and row.text("megatron_sp").lower() in YES, recompute=recompute_of(row.text("act_ckpt")),
        scores_dropped="selective" in row.text("act_ckpt").lower(), offload=_offload(row.text("offload")),
        **_number_formats(row), **_adapters(row),
    )  # fmt: skip


def _software(row: PublishedRow, device: Device, pp: int, stage: int) -> Software:
    """The flags of the framework, with those that the row states itself."""
    found = software_of(
        row.text("framework"), device=device.name, flash=_flash(row, device), precision=row.text("precision").lower(),
        pipeline=pp > 1, zero_stage=stage,
    )  # fmt: skip
    if row.text("compile").lower() in YES:
        found = replace(found, fusion="compiled")
    if "flash-attn 3" in row.text("attn_kernel"):
        found = replace(found, flash=3)
    if found.fusion == "eager" and re.search(r"foak|liger|fast-kernels", row.text("notes") + row.text("fused_ce")):
        found = replace(found, fusion="kernels")
    if "gpt2" not in row.text("model").lower():
        found = replace(found, composed_gelu=False)
    if "mixed_precision=DEFAULT" in row.text("notes"):  # Composer reduces in fp32 then
        found = replace(found, grad_bytes=4)
    blackwell = device.peak_flops / device.multiprocessors > BLACKWELL_FLOPS
    if "CUDA graphs" in row.text("notes") or (blackwell and "bridge" in row.text("framework").lower()):
        found = replace(found, graphs=True)
    if re.search(r"all-to-all overlap", row.text("notes")):
        found = replace(found, ep_overlap=True)
    loss = row.text("fused_ce").lower()
    kind = "linear" if "linear" in loss else "kernel" if loss and loss not in MISSING else ""
    return replace(found, fused_loss=kind) if kind else found


def _number_formats(row: PublishedRow) -> dict[str, Any]:
    """Fields of `Execution` that follow from the precision and the data types of states."""
    precision, states = row.text("precision").lower(), row.text("state_dtypes").lower()
    told = row.text("notes") + row.text("precision") + states
    return {
        "fp8": bool(re.search(r"fp8|fp4", precision)) and "row" not in precision,
        "element_bytes": 4 if precision in ("fp32", "tf32") else 2,
        "master_weights": not re.search(r"bf16-true|no fp32 master", told),
        "fp32_params": bool(re.match(r"fp32 (params|weights)", states)),
    }


def _adapters(row: PublishedRow) -> dict[str, Any]:
    """Fields of `Execution` that follow from the method of fine-tuning."""
    method = row.text("method").lower()
    if "lora" not in method:
        return {}
    targets = row.text("lora_targets").lower()
    where = "all" if "all" in targets or not targets else "attention" if "o" in targets.replace("proj", "") else "qv"
    return {"lora_rank": row.count("lora_rank", 16), "lora_targets": where, "quantized_base": method != "lora"}


def measured_seconds(row: PublishedRow) -> float | None:
    """Measured seconds per step: stated, or derived from tokens per second; None if neither is there."""
    for column in ("step_time_s_derived", "step_time_s"):
        value = row.number_of(column)
        if value is not None and value > 0:
            return value
    rate, batch, seq = row.number_of("tok_s_gpu"), row.number_of("global_batch"), row.number_of("seq_len")
    return batch * seq / rate / cluster_size(row) if rate and batch and seq else None


def cluster_size(row: PublishedRow) -> int:
    """Devices of the job."""
    return row.count("n_gpus", 0) or row.count("tp") * row.count("pp") * row.count("cp") * row.count("dp")


def model_of(row: PublishedRow) -> ModelSpec:
    """A decoder with the row's shape."""
    layers, hidden, heads = (_needed(row, column) for column in ("n_layers", "hidden", "heads"))
    stated = row.text("gated_mlp").lower()
    gated = stated in YES or (stated not in NO and bool(GATED_FAMILIES.search(row.text("model").lower())))
    ffn = row.count("ffn", 4 * hidden)
    kv_heads, vocab = row.count("kv_heads", heads), row.count("vocab", 50304)
    head_dim = row.count("head_dim", max(1, hidden // heads))
    matrices, attention = 3 if gated else 2, hidden * head_dim * 2 * (heads + kv_heads)
    latent = re.search(LATENT, row.text("attn_kernel"))
    if latent:
        q_rank, kv_rank, nope, rope, value = map(int, latent.groups())
        head_dim = (nope + rope + value) // 2  # scores and their product with values
        attention = hidden * (q_rank + kv_rank + rope) + heads * (q_rank * (nope + rope) + kv_rank * (nope + value))
        attention += heads * value * hidden
    dense = attention + matrices * hidden * ffn
    experts = row.count("n_experts", 0)
    sparse_layers = layers - int(row.number_of("n_dense_layers") or 0) if experts else 0
    width, shared, top = row.count("moe_ffn", ffn), int(row.number_of("shared_ffn") or 0), row.count("top_k", 2)
    always, expert = attention + matrices * hidden * shared + hidden * experts, matrices * hidden * width
    tied = row.text("tied_emb").lower() not in NO
    window = WINDOWS.get(next((name for name in WINDOWS if name in row.text("model").lower()), ""), (0, 1))
    return ModelSpec(
        model_type=row.text("model") or "decoder", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, ffn=ffn, gated_mlp=gated, vocab=vocab, max_positions=0, tied_embeddings=tied,
        embedding_params=vocab * hidden, head_params=0 if tied else vocab * hidden,
        layer_params=(dense,) * (layers - sparse_layers) + (always + experts * expert,) * sparse_layers,
        layer_active_params=(dense,) * (layers - sparse_layers) + (always + top * expert,) * sparse_layers,
        window=window[0], window_layers=layers * (window[1] - 1) // window[1],
        **({"experts": experts, "experts_per_token": top, "expert_ffn": width, "shared_ffn": shared,
            "moe_layers": sparse_layers} if sparse_layers else {}),
    )  # fmt: skip


def recompute_of(text: str) -> Recompute:
    """The recompute that an activation-checkpointing cell describes."""
    lowered = text.strip().lower()
    if lowered in NO or lowered in MISSING:
        return RECOMPUTE["none"]
    return next((found for words, found in CHECKPOINTING if re.search(words, lowered)), RECOMPUTE["none"])


def _needed(row: PublishedRow, column: str) -> int:
    value = row.number_of(column)
    if value is None or value < 1:
        raise NotScorable(f"{column} not stated")
    return round(value)


def _device(row: PublishedRow) -> Device:
    name = row.text("gpu")
    hint = f"{row.text('gpu_variant')} {row.text('intra_node')}"
    device = find_device(name, memory_gb=row.number_of("gpu_mem_gb"), hint=hint)
    if device is None:
        raise NotScorable(f"unknown device {name!r}")
    variant = row.text("gpu_variant")
    bandwidth, watts = re.search(r"([\d.]+) ?TB/s", variant), re.search(r"(\d+) ?W\b", variant)
    return replace(
        device,
        memory_bytes_per_second=float(bandwidth[1]) * TERA if bandwidth else device.memory_bytes_per_second,
        power_cap=min(1.0, float(watts[1]) / device.watts) if watts and device.watts else 1.0,
    )


def _cluster(row: PublishedRow, device: Device) -> Cluster:
    devices = cluster_size(row)
    per_node = min(devices, row.count("gpus_per_node", device.link_domain))
    if device.link_domain > 8:
        per_node = min(devices, LARGEST_LINK_DOMAIN)
    link = _link(row.text("intra_node"), device)
    inter = row.number_of("inter_gbps_per_gpu") or device.inter_gbps
    return Cluster(
        name=row.text("source_id"), device=device, nodes=max(1, -(-devices // per_node)), devices_per_node=per_node,
        intra_bytes_per_second=link, inter_bytes_per_second=inter * GBIT, host_memory_bytes=0,
    )  # fmt: skip


def _link(text: str, device: Device) -> float:
    """Bytes per second between devices of a node: as stated (both directions), by PCIe generation, or of the kind."""
    stated = re.search(r"\((\d+) ?GB/s\)", text)
    if stated:
        return float(stated[1]) / 2 * GB
    pcie = re.search(r"pcie ?(?:gen ?)?([345])?", text.lower())
    if pcie and "nvlink" not in text.lower():
        return min(device.link_bytes_per_second, PCIE_GB_PER_SECOND[pcie[1] or "4"] * GB)
    return device.link_bytes_per_second


def _batches(row: PublishedRow, dp: int, pp: int) -> tuple[int, int]:
    """Micro-batch and micro-batches per step; a missing value follows from the global batch."""
    batch, micro, accum = row.number_of("global_batch"), row.number_of("micro_batch"), row.number_of("grad_accum")
    if batch is None:
        if micro is None:
            raise NotScorable("global_batch and micro_batch not stated")
        return max(1, round(micro)), max(1, round(accum or 1))
    share = batch / dp
    if micro is None or micro < 1:  # torch's pipelines split a batch into as many micro-batches as there are stages
        micro = share / accum if accum else share / pp if pp > 1 and share % pp == 0 else 1
    micro = max(1, round(micro))
    return micro, max(1, round(share / micro))


def _flash(row: PublishedRow, device: Device) -> bool:
    """Whether flash attention ran. If unknown with selective recompute: no, or there would be nothing to recompute."""
    text = row.text("flash_attn").lower()
    if not device.flash_attention or text in NO:
        return False
    return text in YES or text not in MISSING or row.text("act_ckpt").lower() != "selective"


def _bubble_share(schedule: str) -> float:
    """Share of the bubble that remains: zero-bubble schedules fill most of it with weight gradients."""
    if re.search(r"zbv|zb-?v|dualpipe", schedule):
        return 0.05
    return 1 / 3 if re.search(r"zb|zero.?bubble", schedule) else 1.0


def _offload(text: str) -> str:
    lowered = text.lower()
    if "cpu" not in lowered and "nvme" not in lowered:
        return "none"
    return ("nvme" if "nvme" in lowered else "cpu") + ("_params" if "param" in lowered else "")


LINEAR_LOSS_BYTES = 3.0
"""Bytes per logit where they are computed in chunks: not all at once, but the largest chunks and their gradients."""
IN_PLACE_BYTES = 4.5
"""Bytes per logit of a loss that overwrites them with their gradient (Megatron)."""
UPCAST_BYTES = 7.5
"""The same under Hugging Face models, which copy logits to fp32 first."""
COMPILED_BYTES = 10.0
KBIT_LOGITS = 1.75
"""Logits over 4-bit weights of bitsandbytes, relative to others: peft runs norms, embeddings and head in fp32."""


def _loss_bytes(row: PublishedRow, e: Execution) -> float:
    """Bytes per logit of a row's loss."""
    if e.software.fused_loss == "linear":
        return LINEAR_LOSS_BYTES
    if e.software.fused_loss:
        return UPCAST_BYTES if e.software.unpadded_vocab else IN_PLACE_BYTES
    each = COMPILED_BYTES if e.software.fusion == "compiled" else LOGIT_BYTES[e.software.fusion]
    alone = e.software.unpadded_vocab and "single GPU" in row.text("framework")
    upcast = alone and row.text("method").lower() == "qlora"
    return each * (KBIT_LOGITS if upcast else 1.0)


def figure_kind(row: PublishedRow) -> str:
    """What a row's memory figure is: `allocated` or `reserved` by torch, or that of the `driver`."""
    told = f"{row.text('mem_kind')} {'' if row.text('mem_kind') else row.text('notes')}".lower()
    if "reserved" in told:
        return "reserved"
    return "allocated" if re.search(r"allocated|\(torch\)", told) else "driver"


def predicted_memory(row: PublishedRow, e: Execution, cal: Calibration) -> dict[str, float]:
    """Predicted bytes of a row: `allocated` and `reserved` by torch, as the `driver` reports them, and `needed`.

    The allocator reserves more than it needs while there is room, and no more than the device has.
    """
    if e.expert_tp == 1:  # experts that are not sliced: as if they were distributed over fewer ranks
        e = replace(e, ep=max(1, e.ep // e.tp))
    used = device_bytes(e, cal)
    params, grads, states = float(used.params), float(used.grads), float(used.optimizer)
    if e.quantized_base and e.model.experts:  # before transformers 5, experts were linear layers, too
        params = (QUANTIZED_BYTES * sum(e.model.layer_params) + 4 * e.model.embedding_params) / state_shards(e)
    if not e.master_weights:
        grads *= e.element_bytes / e.software.grad_bytes
    if e.fp32_params:  # the parameters are the master weights
        grads *= 2 if e.software.grad_bytes == 2 else 1
        params, states = 2 * params, states * 2 / 3
    logits = used.logits * _loss_bytes(row, e) / LOGIT_BYTES[e.software.fusion]
    passing = used.activations + logits + used.gathered + used.buffers
    live = params + grads + states + passing
    if FOREACH.search(row.text("framework").lower()) and not e.lora_rank:
        live = _with_foreach(e, params + states, params, grads, passing)
    fixed = cal.context_bytes + (cal.collective_bytes if e.cluster.devices > 1 else 0.0)
    needed = live * (1 + cal.fragmentation)
    room = e.cluster.device.memory_bytes * DEVICE_SHARE - fixed
    reserved = max(needed, min(live * (1 + cal.reserved), room))
    return {"allocated": live, "reserved": reserved, "driver": reserved + fixed, "needed": needed + fixed}


FOREACH = re.compile(r"(?=.*(trainer|fsdp1|accelerate))(?!.*(deepspeed|composer|compile))")
"""Frameworks that update with torch's `foreach` AdamW, which makes a temporary copy of all updated parameters."""


def _with_foreach(e: Execution, resident: float, params: float, grads: float, passing: float) -> float:
    """Peak of the backward pass, where gradients grow as activations are freed, or of the update with its copy."""
    backward = resident + (max(grads, passing) if e.grad_accum == 1 else grads + passing)
    return max(backward, resident + grads + params)


def least_memory(row: PublishedRow, e: Execution, cal: Calibration) -> float:
    """Bytes that a row needs at least: settings that its source does not state are those that save memory."""
    unknown = re.search(r"unknown|blocks|\?", row.text("act_ckpt").lower())
    if unknown:
        e = replace(e, recompute=RECOMPUTE["full"], scores_dropped=True)
    if "unknown" in row.text("offload").lower():
        e = replace(e, offload="cpu")
    return predicted_memory(row, e, cal)["needed"]
