"""Published measurements: turn a row of a CSV file into an execution, or a reason why it can't be scored."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.clusters.cluster import Cluster
from toolkit.clusters.devices import Device, find_device
from toolkit.cost.execution import RECOMPUTE, Execution, Recompute
from toolkit.cost.software import software_of
from toolkit.errors import BadInput, Problem
from toolkit.models.spec import ModelSpec
from toolkit.units import GB, GBIT, TERA

REQUIRED = (
    "source_id", "model", "n_layers", "hidden", "ffn", "heads", "vocab", "seq_len", "gpu", "n_gpus", "tp", "pp", "dp",
    "zero_stage", "micro_batch", "global_batch", "precision", "act_ckpt", "framework", "step_time_s_derived",
)  # fmt: skip
"""Columns required for a prediction; the others have default values."""
NUMBERS = (
    "n_layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq_len", "gpu_mem_gb", "n_gpus", "gpus_per_node",
    "inter_gbps_per_gpu", "tp", "pp", "vpp", "cp", "dp", "shard_group", "zero_stage", "micro_batch", "grad_accum",
    "global_batch", "tok_s_gpu", "step_time_s", "mem_gib", "step_time_s_derived",
)  # fmt: skip
MISSING = frozenset(("", "?", "-", "none", "n/a", "na", "nan", "null", "unknown", "auto", "not stated"))
YES = frozenset(("1", "1.0", "true", "yes", "y", "on"))
NO = frozenset(("0", "0.0", "false", "no", "n", "off"))
CHECKPOINTING = (
    (r"unknown|\?", Recompute()),
    (r"selective_?op", Recompute(0.5, 0, 1, 0.5, kept=0.45)),
    (r"selective_?layer_?2|every.?(2|second)", Recompute(0.5, 0.5, 0.5, 0.5, kept=0.5)),
    (r"mlp", Recompute(stream=1, mlp_up=1, kept=0.4)),
    (r"qkv|out_?proj", Recompute(attention=1, stream=1, mlp_up=1, kept=0.3)),
    (r"dot", Recompute(attention=1, stream=1, kept=0.5)),
    (r"selective|attention|attn|core", RECOMPUTE["selective"]),
    (r"full|^1$|true|yes|layer|block|uniform", RECOMPUTE["full"]),
)
"""Patterns for the activation-checkpointing cell; the first match counts, and no match means no recompute."""
GATED_FAMILIES = re.compile(r"llama|mistral|mixtral|qwen|gemma|internlm|deepseek|olmo|yi-")
"""Model names that imply a gated MLP if the column is empty."""
PCIE_GB_PER_SECOND = {"3": 12, "4": 25, "5": 50}
"""Bandwidth of a PCIe generation between two devices of a node, in one direction."""
LARGEST_LINK_DOMAIN = 64
"""Ranks of a job inside an NVL72 domain: the largest power of two up to 72."""


@dataclass(frozen=True)
class PublishedRow:
    """One line of the file, as text, with its line number."""

    number: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """A cell, stripped of blanks."""
        return (self.cells.get(column) or "").strip()

    def number_of(self, column: str) -> float | None:
        """A cell as a number; None if it is empty, negative or infinite."""
        text = self.text(column).replace(",", "")
        value = None if text.lower() in MISSING else float(text)
        return value if value is not None and 0 <= value < math.inf else None

    def count(self, column: str, default: int = 1) -> int:
        """A cell as an integer of at least 1; `default` if it states none."""
        value = self.number_of(column)
        return default if value is None or value < 1 else round(value)


class NotScorable(Exception):
    """A row that lacks what a prediction needs; the message is the reason."""


def read_rows(path: Path) -> list[PublishedRow]:
    """All rows; raises `BadInput` that names missing columns, and cells that should be numbers."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise BadInput(str(path), "is a device or a pipe; a CSV file is required")
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = [PublishedRow(number, _texts(cells)) for number, cells in enumerate(reader, 2)]
            columns = reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(str(path), f"can't be read as CSV: {error}") from error
    missing = [column for column in REQUIRED if column not in columns]
    if missing:
        raise BadInput(str(path), f"missing columns: {', '.join(missing)}")
    if not rows:
        raise BadInput(str(path), "has a header, but no rows; at least one measurement is required")
    problems = list(_text_in_numbers(rows))
    if problems:
        raise BadInput(str(path), problems)
    return rows


def _texts(cells: Mapping[str | None, object]) -> dict[str, str]:
    """Cells with a column name: a line may be longer or shorter than the header."""
    return {column: text for column, text in cells.items() if column is not None and isinstance(text, str)}


def _text_in_numbers(rows: list[PublishedRow]) -> Iterator[Problem]:
    for row in rows:
        for column in NUMBERS:
            try:
                row.number_of(column)
            except ValueError:
                what = f"{row.text(column)!r} given; a number is required, or an empty cell"
                yield Problem(f"row {row.number}, column {column}", what)


def execution_of(row: PublishedRow) -> Execution:
    """The execution that a row describes; raises `NotScorable` if it states too little."""
    device = _device(row)
    cluster = _cluster(row, device)
    tp, pp, cp = row.count("tp"), row.count("pp"), row.count("cp")
    dp = row.count("dp", max(1, cluster_size(row) // (tp * pp * cp)))
    micro_batch, grad_accum = _batches(row, dp, pp)
    stage = int(row.number_of("zero_stage") or 0)
    schedule = row.text("pp_schedule").lower()
    precision = row.text("precision").lower()
    flash = _flash(row, device)
    return Execution(
        model=model_of(row), cluster=cluster, seq_len=_needed(row, "seq_len"), micro_batch=micro_batch,
        grad_accum=grad_accum, dp=dp, tp=tp, pp=pp, cp=cp,
        software=software_of(
            row.text("framework"), device=device.name, flash=flash, precision=precision, pipeline=pp > 1,
            zero_stage=stage,
        ),
        chunks=row.count("vpp", 2 if "interleav" in schedule else 1), bubble_share=_bubble_share(schedule),
        zero_stage=min(3, stage), zero_group=row.count("shard_group", dp * cp if stage else 1),
        residual_shards=tp > 1 and row.text("megatron_sp").lower() in YES, recompute=recompute_of(row.text("act_ckpt")),
        scores_dropped="selective" in row.text("act_ckpt").lower(), fp8="fp8" in precision and "row" not in precision,
        element_bytes=4 if precision in ("fp32", "tf32") else 2, offload=_offload(row.text("offload")),
        master_weights=not re.search(r"bf16-true|no fp32 master", row.text("notes") + row.text("precision")),
    )  # fmt: skip


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
    head_dim = max(1, hidden // heads)
    layer = hidden * head_dim * 2 * (heads + kv_heads) + (3 if gated else 2) * hidden * ffn
    tied = row.text("tied_emb").lower() not in NO
    return ModelSpec(
        model_type=row.text("model") or "decoder", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, ffn=ffn, gated_mlp=gated, vocab=vocab, max_positions=0, tied_embeddings=tied,
        embedding_params=vocab * hidden, layer_params=(layer,) * layers, layer_active_params=(layer,) * layers,
        head_params=0 if tied else vocab * hidden,
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
        watts=float(watts[1]) if watts and device.watts else device.watts,
    )


def _cluster(row: PublishedRow, device: Device) -> Cluster:
    devices = cluster_size(row)
    per_node = min(devices, row.count("gpus_per_node", device.link_domain))
    if device.link_domain > 8 and "NVL72" in row.text("intra_node").upper():
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
    if device.name.startswith("V100") or text in NO:
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
