"""Jobs that several planning tests share; the shapes are public."""

from __future__ import annotations

from toolkit.clusters.cluster import Cluster
from toolkit.clusters.devices import DEVICES
from toolkit.models.spec import ModelSpec
from toolkit.plans.plan import Job, Workload

GIB = 2**30


def decoder(
    layers: int = 32, hidden: int = 4096, ffn: int = 11008, heads: int = 32, kv_heads: int = 32, vocab: int = 32000,
    *, gated: bool = True, tied: bool = False, experts: int = 0, per_token: int = 0, expert_ffn: int = 0,
) -> ModelSpec:  # fmt: skip
    """Llama-2-7B unless told otherwise; norms count."""
    head_dim = hidden // heads
    matrices = 3 if gated else 2
    attention = 2 * hidden * (heads + kv_heads) * head_dim
    dense = attention + matrices * hidden * ffn + 2 * hidden
    mixed = attention + experts * matrices * hidden * expert_ffn + experts * hidden + 2 * hidden
    active = attention + per_token * matrices * hidden * expert_ffn + experts * hidden + 2 * hidden
    return ModelSpec(
        model_type="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn,
        gated_mlp=gated, vocab=vocab, max_positions=0, tied_embeddings=tied, experts=experts,
        experts_per_token=per_token, expert_ffn=expert_ffn, moe_layers=layers if experts else 0,
        embedding_params=vocab * hidden, layer_params=(mixed if experts else dense,) * layers,
        layer_active_params=(active if experts else dense,) * layers,
        head_params=hidden + (0 if tied else vocab * hidden),
    )  # fmt: skip


LLAMA_2_7B = decoder()
LLAMA_3_8B = decoder(ffn=14336, kv_heads=8, vocab=128256)
LLAMA_3_405B = decoder(126, 16384, 53248, 128, 8, 128256)
GPT_3_175B = decoder(96, 12288, 49152, 96, 96, 51200, gated=False, tied=True)


def cluster(device: str = "A100-SXM4-80GB", nodes: int = 1, per_node: int = 8, host_gib: int = 2000) -> Cluster:
    """Equal nodes with the links that usually come with the device."""
    kind = DEVICES[device]
    return Cluster(
        name=device, device=kind, nodes=nodes, devices_per_node=per_node,
        intra_bytes_per_second=kind.link_bytes_per_second, inter_bytes_per_second=kind.inter_gbps * 1e9 / 8,
        host_memory_bytes=host_gib * GIB,
    )  # fmt: skip


def job(model: ModelSpec = LLAMA_2_7B, machines: Cluster | None = None, **work: object) -> Job:
    """A bf16 job of 64 sequences of 2048 tokens unless told otherwise."""
    settings: dict[str, object] = {"global_batch": 64, "seq_len": 2048, "precision": "bf16", **work}
    return Job(model=model, cluster=machines or cluster(), workload=Workload(**settings))  # type: ignore[arg-type]
