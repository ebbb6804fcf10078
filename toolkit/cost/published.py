"""Published measurements: turn a row of a CSV file into an execution, or a reason why it can't be scored."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from toolkit.clusters.cluster import Cluster
from toolkit.clusters.devices import Device, find_device
from toolkit.cost.execution import Execution
from toolkit.cost.published_rows import MISSING, NO, YES, NotScorable, PublishedRow
from toolkit.cost.software import CORE_ATTENTION, RECOMPUTE, Recompute, Software, software_of
from toolkit.models.spec import ModelSpec
from toolkit.units import GB, GBIT, GIB, TERA

MOE_ACT = Recompute(stream=0.5, kept=0.4)
"""Norms and the activations of experts are recomputed (Megatron-Core)."""
SELECTIVE_OP = Recompute(0.5, 0, 1, 0.5, kept=0.4)
"""Every second matmul and attention are saved (torchtitan)."""
CHECKPOINTING = (
    (r"unknown|\?", Recompute()),
    (r"whole moe", Recompute(0.6, 0, 1, 0, kept=0.2)),
    (r"moe_act", MOE_ACT),
    (r"selective_?op", SELECTIVE_OP),
    (r"selective_?layer_?2|every.?(2|second)", Recompute(0.5, 0.5, 0.5, 0.5, kept=0.5)),
    (r"mlp", Recompute(stream=1, mlp_up=1, kept=0.25)),
    (r"qkv|out_?proj", Recompute(attention=1, stream=1, mlp_up=1, kept=0.15)),
    (r"dot", Recompute(attention=1, stream=1, kept=0.5)),
    (r"selective|attention|attn|core", CORE_ATTENTION),
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
PACKED = re.compile(r"(?<!not )\bpacked")
KEEPS_APART = re.compile(r"swift|axolotl|llama-?factory")
"""Frameworks whose packing keeps documents apart in attention."""
DOCUMENT_SHARE = 0.3
"""Length of packed documents, weighted by tokens, relative to the longest one, which the sequence is cut to fit (an
estimate)."""
LIMITED_GLU = re.compile(r"gpt-?oss")
"""Models whose gated activation has limits and biases."""
LAST_UNFUSED = "26.04.01"
"""Last release of Megatron-Bridge before casts and activations are fused with 8-bit experts."""
TUNED_IMBALANCE = 1.8
"""Tokens of the busiest expert-parallel rank relative to the mean in fine-tuning (an estimate): 1.4 in pre-training
without forced balance (Megatron-MoE-ModelZoo: 237 of 295 TFLOP/s, where experts take 60% of the time)."""
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
        model=model_of(row), cluster=cluster, seq_len=_seq_len(row), micro_batch=micro_batch,
        grad_accum=grad_accum, dp=dp, tp=tp, pp=pp, cp=1 if ulysses else cp, sp=cp if ulysses else 1,
        ep=min(row.count("ep"), row.count("n_experts")), software=_software(row, device, pp, stage),
        expert_tp=row.count("etp") if row.count("n_experts", 0) else 0, expert_load=_expert_load(row),
        chunks=row.count("vpp", 2 if "interleav" in schedule else 1), bubble_share=_bubble_share(schedule),
        zero_stage=min(3, stage), zero_group=row.count("shard_group", dp * cp if stage else 1),
        residual_shards=tp > 1 and row.text("megatron_sp").lower() in YES, recompute=_recompute(row),
        scores_dropped="selective" in row.text("act_ckpt").lower(), offload=_offload(row.text("offload")),
        optimizer=_optimizer(row),
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
    if "all-to-all dispatcher" in row.text("notes"):  # Megatron's own, without DeepEP
        found = replace(found, dispatch_once=False)
    found = replace(found, **_expert_flags(row, device, pp), **_fine_tuning_flags(row, found))
    if "mixed_precision=DEFAULT" in row.text("notes") or found.autocast:  # gradients are reduced in fp32 then
        found = replace(found, grad_bytes=4)
    loss = row.text("fused_ce").lower()
    kind = "linear" if "linear" in loss else "kernel" if loss and loss not in MISSING else ""
    return replace(found, fused_loss=kind) if kind else found


def _expert_flags(row: PublishedRow, device: Device, pp: int) -> dict[str, Any]:
    """Flags for mixtures: what is stated, or the settings of Megatron-Bridge's recipes.

    These overlap exchanges where the schedule can: without a pipeline, or with several chunks per stage. They use CUDA
    graphs on Grace hosts, and where dropped tokens make shapes static."""
    notes, bridge, fused = row.text("notes"), _is_bridge(row), _fuses_experts(row)
    static = device.name.startswith("GB") or "(tokendrop)" in notes or not row.count("n_experts", 0)
    return {
        "graphs": "CUDA graphs" in notes or (bridge and static),
        "ep_overlap": "all-to-all overlap" in notes or (bridge and (pp == 1 or row.count("vpp") > 1)),
        "fused_experts": fused,
        "composed_glu": bool(LIMITED_GLU.search(row.text("model").lower())),
    }


def _is_bridge(row: PublishedRow) -> bool:
    return "bridge" in row.text("framework").lower()


def _fuses_experts(row: PublishedRow) -> bool:
    """Whether a row is of a release that fuses experts: its notes name releases before its own."""
    earlier = re.findall(r"\b\d\d\.\d\d(?:\.\d\d)?(?=:)", row.text("notes"))
    return _is_bridge(row) and "mxfp8" in row.text("precision") and max(earlier, default="") >= LAST_UNFUSED


def _fine_tuning_flags(row: PublishedRow, found: Software) -> dict[str, Any]:
    """Flags for packed documents, adapters, autocast and what the figure includes."""
    framework, method = row.text("framework").lower(), row.text("method").lower()
    packed = bool(PACKED.search(row.text("notes").lower()) and KEEPS_APART.search(framework))
    adapters = "lora" in method and found.unpadded_vocab
    return {
        "document_share": DOCUMENT_SHARE if packed else 1.0,
        "fp32_adapters": adapters,
        "fp32_residual": adapters and method == "qlora" and "single gpu" in framework,
        "autocast": "autocast" in row.text("state_dtypes").lower(),
        "step_hooks": 1 if "step timers" in row.text("notes") else 2,  # timers leave out what is between passes
    }


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
    if not targets and _is_bridge(row):
        where = "qv"  # its performance recipes adapt queries, keys and values
    return {"lora_rank": row.count("lora_rank", 16), "lora_targets": where, "quantized_base": method != "lora"}


def _expert_load(row: PublishedRow) -> float:
    """Load of the busiest rank: even where the source forces it."""
    return 1.0 if "balanced" in row.text("notes").lower() else TUNED_IMBALANCE


def sparing(row: PublishedRow, e: Execution) -> Execution:
    """The execution with settings that save memory where the source does not state them."""
    if re.search(r"unknown|blocks|\?", row.text("act_ckpt").lower()):
        e = replace(e, recompute=RECOMPUTE["full"], scores_dropped=True)
    return replace(e, offload="cpu") if "unknown" in row.text("offload").lower() else e


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
    sparse: dict[str, Any] = {
        "experts": experts, "experts_per_token": top, "expert_ffn": width, "shared_ffn": shared,
        "moe_layers": sparse_layers,
    }  # fmt: skip
    return ModelSpec(
        model_type=row.text("model") or "decoder", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, ffn=ffn, gated_mlp=gated, vocab=vocab, max_positions=0, tied_embeddings=tied,
        embedding_params=vocab * hidden, head_params=0 if tied else vocab * hidden,
        layer_params=(dense,) * (layers - sparse_layers) + (always + experts * expert,) * sparse_layers,
        layer_active_params=(dense,) * (layers - sparse_layers) + (always + top * expert,) * sparse_layers,
        window=window[0], window_layers=layers * (window[1] - 1) // window[1],
        **(sparse if sparse_layers else {}),
    )  # fmt: skip


ROUNDED = 0.1
"""Difference between a stated memory size and that of the device kind that is rounding: 192 GB and 180 GiB."""
PADDED_TOKENS = 512
"""Length of padded batches of instruction data, where a row states only the longest length that is allowed."""
UNSAVED = Recompute(1, 0, 1, 0.5, kept=0.1)
"""Selective recompute where matmuls are not among the operators whose results are saved: torchao's in 4 bits."""


def _seq_len(row: PublishedRow) -> int:
    stated = _needed(row, "seq_len")
    padded = "not packed" in row.text("notes").lower() and "length" in row.text("inferred_fields").lower()
    return min(stated, PADDED_TOKENS) if padded else stated


def _recompute(row: PublishedRow) -> Recompute:
    """What the row states; if it does not, what Megatron-Bridge's recipes for mixtures recompute."""
    if "unknown" in row.text("act_ckpt") and _is_bridge(row) and row.count("n_experts", 0) and not _fuses_experts(row):
        return MOE_ACT
    found = recompute_of(row.text("act_ckpt"))
    four_bits = found == SELECTIVE_OP and "nvfp4" in row.text("precision").lower()
    return UNSAVED if four_bits else found


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
    stated = (row.number_of("gpu_mem_gb") or 0.0) * GIB
    differs = stated and abs(stated / device.memory_bytes - 1) > ROUNDED
    return replace(
        device,
        memory_bytes=int(stated) if differs else device.memory_bytes,
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


def _optimizer(row: PublishedRow) -> str:
    """The optimizer whose states a row has; others than those of the table are counted as AdamW."""
    text = row.text("optimizer").lower()
    return next((name for name in ("lion", "lamb", "lars", "sgd") if name in text), "adamw")


def _offload(text: str) -> str:
    lowered = text.lower()
    if "cpu" not in lowered and "nvme" not in lowered:
        return "none"
    return ("nvme" if "nvme" in lowered else "cpu") + ("_params" if "param" in lowered else "")
