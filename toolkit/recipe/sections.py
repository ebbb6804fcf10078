"""The recipe: what a person writes. One frozen dataclass a section; each field is documented under itself."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from toolkit.recipe.axes import Offload, Recompute, TensorBy, ZeroQuantized, ZeroVariant
from toolkit.recipe.batch_sections import BatchRamp, Outer, Reduce
from toolkit.recipe.metrics_sections import Metrics
from toolkit.recipe.schema import number

Precision = Literal["bf16", "fp16", "fp32"]
Format = Literal["text", "instruction", "chat", "classification", "image-classification", "seq2seq"]
Task = Literal["causal-lm", "classification", "image-classification", "seq2seq"]
OptimizerName = Literal["adamw", "lamb", "lars", "lion", "sgd", "onebit_adam", "onebit_lamb", "zero_one_adam"]


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters instead of all weights."""

    rank: int = number(16, least=1)
    """Rank of each adapter."""
    alpha: float = number(32.0, above=0)
    """Scale of the adapters, relative to the rank."""
    dropout: float = number(0.0, least=0, most=1)
    """Dropout before each adapter."""
    targets: tuple[str, ...] | str = "auto"
    """Module names that get an adapter; `auto`: every linear layer but the head."""
    quantize: Literal["none", "4bit"] = "none"
    """`4bit`: the frozen base in 4 bits (QLoRA); needs the extra `qlora`, pretrained weights and ZeRO below 3."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The Hugging Face model."""

    path: str | None = None
    """Hub id, local directory, or a name in configs/models; or give `config` instead."""
    config: dict[str, Any] | None = None
    """A Hugging Face config, inline: the model is built from scratch."""
    init: Literal["pretrained", "scratch"] | None = None
    """Weights to start from; default: `pretrained` with `path`, `scratch` with `config`."""
    precision: Precision = "bf16"
    """Data type of the forward and backward pass; masters and moments are fp32."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation; `auto`: what transformers chooses."""
    lora: Lora | None = None
    """Train adapters only."""
    task: Task | None = None
    """What the model is for: which head it gets; default: what `data.format` needs."""
    num_labels: int | None = number(None, least=1)
    """Classes of a classification head; default: the config's."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources that you trust."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The training data."""

    path: str | dict[str, float] = "synthetic"
    """Hub id (`id` or `id:config`), file, glob or directory (txt, jsonl, csv, parquet, arrow), `synthetic`, or
    `python-stdlib`; a mapping of such sources to weights mixes them."""
    format: Format = "text"
    """What a row is, and what of it is learned; see docs/data.md."""
    tokenizer: str | None = None
    """Hub id or directory of a tokenizer, or `bytes`; default: the model's."""
    seq_len: int = number(512, least=2)
    """Tokens of a sequence."""
    packing: bool = True
    """Fill sequences with several documents instead of padding; for text, instruction and chat."""
    packing_method: Literal["auto", "best_fit", "stream"] = "auto"
    """`best_fit`: documents do not see each other; `stream`: one stream of text cut at `seq_len`, for pre-training;
    `auto`: best_fit, or with text a stream if the model's type can't keep documents apart."""
    long_documents: Literal["split", "truncate"] = "split"
    """What happens to documents longer than `seq_len`; without packing they are truncated."""
    text_column: str = "text"
    """Column with the text: text, classification."""
    messages_column: str = "messages"
    """Column with the messages: chat. A column `tools` goes to the chat template, too."""
    prompt_column: str = "prompt"
    """Column with what is asked: instruction, seq2seq."""
    context_column: str | None = None
    """Column with more of what is asked, which may be empty: instruction."""
    response_column: str = "response"
    """Column with what is answered: instruction, seq2seq."""
    label_column: str = "label"
    """Column with the class, a number or a name: classification, image-classification."""
    image_column: str = "image"
    """Column with the image, a path or bytes: image-classification. A directory of classes needs no columns."""
    eval_path: str | None = None
    """Held-out data for `train.eval_every`; or give `eval_fraction`."""
    eval_fraction: float = number(0.0, least=0, most=0.5)
    """Share of the documents that is held out for `train.eval_every`."""
    streaming: bool = False
    """Read the source while training, for what does not fit the disk; needs packing and `train.steps`."""
    workers: int | None = number(None, least=1)
    """Processes that tokenise; default: the cores of this machine."""
    cache: str = "~/.cache/zero-toolkit/data"
    """Directory of tokenised data, shared by all ranks and runs."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """Optimisation, the same under every strategy."""

    global_batch: int = number(64, least=1)
    """Sequences a step, over all devices."""
    critical_batch: int | None = number(None, least=1)
    """Sequences beyond which a larger batch hardly saves steps; `toolkit scale` warns where it is passed."""
    steps: int | None = number(None, least=1)
    """Steps to train; or give `epochs`."""
    epochs: float | None = number(None, above=0)
    """Passes over the data; or give `steps`."""
    optimizer: OptimizerName = "adamw"
    """Update rule; `lamb` and `lars` scale each layer's update by its norms; momentum of `lars` is the first beta."""
    freeze_steps: int | None = number(None, least=1)
    """Steps before `onebit_adam` compresses; needed by it. Longer than the warm-up of the learning rate is best."""
    lr: float = number(3e-4, above=0)
    """Peak learning rate."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: float = number(1e-8, above=0)
    """Added to the second moment's root."""
    weight_decay: float = number(0.0, least=0)
    """Decoupled weight decay."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate follows `global_batch` relative to `base_batch`."""
    base_batch: int | None = number(None, least=1)
    """Batch that `lr` was chosen for; needed by `lr_scaling`."""
    batch_ramp: BatchRamp | None = None
    """A batch that grows; with `lr_scaling` the learning rate follows the batch of each step."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate after the warm-up."""
    min_lr_ratio: float = number(0.1, least=0, most=1)
    """Last learning rate over the peak, for `cosine` and `linear`."""
    warmup: float = number(0.03, least=0)
    """Fraction of all steps if below 1, else steps."""
    grad_clip: float = number(1.0, least=0)
    """Largest global gradient norm; 0: no clipping."""
    grad_reduce: Literal["mean", "sum"] = "mean"
    """Gradient of the mean loss over counted tokens, or of the sum over sequences."""
    reduce: Reduce = field(default_factory=Reduce)
    """How gradients of replicas are added up."""
    outer: Outer | None = None
    """Exchange between the islands of `local_sgd`; default: average."""
    seed: int = number(0, least=0, most=2**31 - 1)
    """Seed of weights, data order and dropout."""
    eval_every: int = number(0, least=0)
    """Steps between two evaluations on held-out data; 0: none. The best checkpoint is kept."""
    eval_samples: int | None = number(None, least=1)
    """Most held-out samples of an evaluation; default: all."""
    hang_timeout_seconds: float = number(600.0, above=0)
    """No rank gets anything done for so long: the run ends, and the rank that holds the others up is named."""
    on_oom: Literal["stop", "replan"] = "stop"
    """Out of device memory: stop and show the next plan, or go on under it from the last checkpoint."""
    on_spike: Literal["ignore", "rewind"] = "ignore"
    """A loss `spike_factor` times the usual: `rewind` goes back to the last checkpoint and skips the batches since."""
    spike_factor: float = number(3.0, above=1)
    """How far above the median of the last 20 steps a loss is a spike; used with `on_spike: rewind`."""


@dataclass(frozen=True, kw_only=True)
class StrategySection:
    """How the work is spread. Any axis may be fixed; the planner fills the rest."""

    name: str = "auto"
    """`auto` or a name of `toolkit strategies`."""
    dp: int | None = number(None, least=1)
    """Data-parallel replicas."""
    tp: int | None = number(None, least=1)
    """Tensor-parallel ranks."""
    pp: int | None = number(None, least=1)
    """Pipeline stages."""
    sp: int | None = number(None, least=1)
    """Sequence-parallel ranks."""
    ep: int | None = number(None, least=1)
    """Expert-parallel ranks."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """What ZeRO shards: 1 optimizer states, 2 + gradients, 3 + parameters."""
    zero_group: int | None = number(None, least=1)
    """Ranks that hold one full set of sharded states."""
    zero_variant: ZeroVariant | None = None
    """How a smaller `zero_group` is made: ZeRO++ hpZ or MiCS."""
    zero_quantized: ZeroQuantized | None = None
    """ZeRO++ quantised traffic."""
    offload: Offload | None = None
    """Optimizer states on the host's memory or disk; `*_params`: parameters too."""
    nvme_path: str | None = None
    """Directory on the fast disk, for `nvme` offload."""
    micro_batch: int | None = number(None, least=1)
    """Sequences that one replica computes at a time."""
    grad_accum: int | None = number(None, least=1)
    """Micro-batches a step."""
    recompute: Recompute | None = None
    """Which activations are computed again in the backward pass."""
    tensor_by: TensorBy | None = None
    """Who cuts matrices under `tensor_parallel`: the toolkit, or DeepSpeed's AutoTP if a trial shows it exact."""
    islands: int | None = number(None, least=1)
    """Groups that synchronise every `local_steps` steps."""
    local_steps: int | None = number(None, least=1)
    """Steps between two exchanges of islands."""
    pipeline_bounds: tuple[int, ...] | None = None
    """First layer of each pipeline stage, and the number of layers, e.g. [0, 3, 6]; default: balanced by time."""

    def fixed(self) -> dict[str, Any]:
        """The axes that are given: plan field → value."""
        return {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) is not None}


AXES = tuple(f.name for f in fields(StrategySection) if f.name not in ("name", "nvme_path"))
"""Axes of a plan that a recipe may fix under `strategy`: the fields of `Plan` but its strategy and precision."""


@dataclass(frozen=True, kw_only=True)
class ClusterSection:
    """A cluster, inline."""

    device: str
    """Kind of device, as in `toolkit strategies --devices`; `cpu` for processes on the host."""
    nodes: int = number(1, least=1)
    """Number of nodes."""
    devices_per_node: int = number(8, least=1)
    """Devices of a node."""
    intra_gb_per_second: float | None = number(None, above=0)
    """Between two devices of one node, gigabytes a second, one direction; default: the kind's."""
    inter_gbps_per_device: float | None = number(None, above=0)
    """Network of one device, gigabit a second; default: the kind's."""
    host_memory_gib: float | None = number(None, above=0)
    """Memory of one node's host."""
    nvme_gib: float = number(0.0, least=0)
    """Fast local disk of one node."""
    memory_gib: float | None = number(None, above=0)
    """Memory of one device; default: the kind's."""
    matmul_tflops: float | None = number(None, above=0)
    """Sustained matmul rate of one device, as `toolkit probe` measures it; default: the kind's."""
    memory_gb_per_second: float | None = number(None, above=0)
    """Bandwidth of a device's own memory; default: the kind's."""
    latency_us: float | None = number(None, above=0)
    """Start-up of a collective inside a node, microseconds."""
    inter_latency_us: float | None = number(None, above=0)
    """Start-up of a collective across nodes, microseconds."""
    sites: int = number(1, least=1)
    """Places that the nodes are split over, with a slow link between them; must divide `nodes`."""
    site_gbps: float | None = number(None, above=0)
    """Link between two sites, gigabit a second; required with `sites`."""
    site_latency_ms: float = number(30.0, least=0)
    """Start-up of a collective across sites, milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saving and going on."""

    every: int = number(0, least=0)
    """Steps between two checkpoints; 0: none."""
    keep: int = number(3, least=1)
    """Newest checkpoints that are kept."""
    resume: str = "auto"
    """`auto`: go on from the newest checkpoint of the run directory; `none`; or a checkpoint's path."""
    asynchronous: bool = False
    """Copy the state to host memory and write it while training goes on; needs host memory for the copy."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole training job."""

    name: str = "run"
    """Letters, digits, `.`, `_`, `-`: names the run directory and the W&B run."""
    model: Model
    """The Hugging Face model."""
    data: Data = field(default_factory=Data)
    """The training data."""
    train: Train = field(default_factory=Train)
    """Optimisation."""
    strategy: StrategySection = field(default_factory=StrategySection)
    """How the work is spread."""
    cluster: str | ClusterSection = "auto"
    """`auto` (this machine), a name in configs/clusters, a path, or a mapping."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """Saving and going on."""
    metrics: Metrics = field(default_factory=Metrics)
    """What is recorded."""
    output: str = "runs"
    """Directory of run directories."""
