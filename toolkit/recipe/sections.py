"""The recipe: one frozen dataclass per section. The docstring under a field is its help text and documentation."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from toolkit.recipe.axes import Offload, PipelineSchedule, Recompute, TensorBy, ZeroQuantized, ZeroVariant
from toolkit.recipe.batch_sections import BatchRamp, Outer, Reduce
from toolkit.recipe.metrics_sections import Metrics
from toolkit.recipe.model_section import Model
from toolkit.recipe.objective_sections import Contrastive, Distill, Objective, Preference, Rank, Router
from toolkit.recipe.optimizer_sections import Ema, Muon
from toolkit.recipe.schema import number

Format = Literal[
    "text", "instruction", "chat", "preference", "pairs", "ranking", "classification", "image-classification", "seq2seq"
]  # fmt: skip
OptimizerName = Literal[
    "adamw", "muon", "schedule_free", "adopt", "lamb", "lars", "lion", "sgd", "onebit_adam", "onebit_lamb",
    "zero_one_adam", "adafactor",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Data:
    """The training data."""

    path: str | dict[str, float] = "synthetic"
    """Hub id (`id` or `id:config`), file, glob or directory (txt, jsonl, csv, parquet, arrow), `synthetic`, or
    `python-stdlib`; a mapping of such sources to weights mixes them."""
    format: Format = "text"
    """What a row contains, and which part of it is trained on; see docs/data.md."""
    tokenizer: str | None = None
    """Hub id or directory of a tokenizer, or `bytes`, or `items:N` for lists of item ids from 0 to N - 1 (pairs);
    default: the tokenizer of the model."""
    seq_len: int = number(512, least=2, most=2**30)
    """Tokens per sequence."""
    packing: bool = True
    """Fill sequences with several documents instead of padding; for text, instruction, chat and preference."""
    packing_method: Literal["auto", "best_fit", "stream"] = "auto"
    """`best_fit`: documents do not attend to each other; `stream`: one text stream cut every `seq_len` tokens, for
    pre-training; `auto`: best_fit, or stream for text if the model type can't keep documents apart."""
    long_documents: Literal["split", "truncate"] = "split"
    """What to do with documents longer than `seq_len`; without packing they are always truncated."""
    text_column: str = "text"
    """Column with the text (text, classification)."""
    messages_column: str = "messages"
    """Column with the messages (chat). A `tools` column is passed to the chat template, too."""
    prompt_column: str = "prompt"
    """Column with the prompt (instruction, seq2seq; preference, unless answers are complete conversations)."""
    context_column: str | None = None
    """Column with additional context for the prompt, which may be empty (instruction)."""
    response_column: str = "response"
    """Column with the response (instruction, seq2seq; preference, where `label_column` says whether it is good)."""
    chosen_column: str = "chosen"
    """Column with the better answer, a text or messages (preference)."""
    rejected_column: str = "rejected"
    """Column with the worse answer, a text or messages (preference)."""
    margin_column: str = "margin"
    """Column with how much better the chosen answer is, which may be missing (preference, objective reward)."""
    query_column: str = "query"
    """Column with the query, a text or item ids (pairs, ranking)."""
    positive_column: str = "positive"
    """Column with what is to be found for the query, a text or item ids (pairs)."""
    negatives_column: str = "negatives"
    """Column with a list of what must not be found for the query (pairs); read if `negatives` is above 0."""
    negatives: int = number(0, least=0)
    """Hard negatives per query, the first of each list (pairs)."""
    candidates_column: str = "candidates"
    """Column with a list of texts to be ranked for the query (ranking)."""
    scores_column: str = "scores"
    """Column with a list of numbers: how relevant each candidate is (ranking)."""
    candidates: int = number(8, least=2)
    """Most candidates per query; shorter lists are padded (ranking)."""
    label_column: str = "label"
    """Column with the class, a number or a name (classification, image-classification), or true or false for a good or
    a bad response (preference, unpaired)."""
    image_column: str = "image"
    """Column with the image, a path or bytes (image-classification). A directory per class needs no columns."""
    train_on: Literal["all", "last_turn"] = "all"
    """Which turns of a conversation the loss counts: all those of `roles`, or the last of them (chat)."""
    roles: tuple[str, ...] = ("assistant",)
    """Roles whose messages the loss counts (chat)."""
    max_samples: int | None = number(None, least=1)
    """Maximum number of documents of each source to train on, for trials; default: all."""
    eval_path: str | None = None
    """Held-out data for `train.eval_every`; or set `eval_fraction`."""
    eval_fraction: float = number(0.0, least=0, most=0.5)
    """Fraction of the documents held out for `train.eval_every`."""
    streaming: bool = False
    """Read the source during training, for data that does not fit on disk; needs packing and `train.steps`."""
    workers: int | None = number(None, least=1)
    """Processes that tokenise; default: one per core of this machine."""
    cache: str = "~/.cache/zero-toolkit/data"
    """Directory for tokenised data, shared by all ranks and runs."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """Optimisation settings, which mean the same under every strategy."""

    global_batch: int = number(64, least=1, most=2**31)
    """Sequences per step, over all devices."""
    critical_batch: int | None = number(None, least=1)
    """Batch size, in sequences, beyond which a larger batch hardly saves steps; `toolkit scale` warns above it."""
    steps: int | None = number(None, least=1)
    """Steps to train; or set `epochs`."""
    epochs: float | None = number(None, above=0)
    """Passes over the data; or set `steps`."""
    objective: Objective | None = None
    """What is minimised instead of the cross-entropy; see docs/finetuning.md."""
    label_smoothing: float = number(0.0, least=0, most=0.5)
    """Share of every label that is spread evenly over the vocabulary or the classes; evaluations report plain
    cross-entropy."""
    neftune_alpha: float | None = number(None, above=0)
    """NEFTune: uniform noise on the embeddings of training samples, of size alpha / √(tokens · hidden size); 5 to 15
    are usual. The noise follows from seed, step and sample, so no split changes it. Default: none."""
    preference: Preference | None = None
    """Settings of objectives that learn from better and worse answers."""
    reference: Literal["cached", "live"] | None = None
    """Where `dpo`, `ipo` and `kto` get the reference's log-probabilities: `cached`, the default, computes them once
    before training; `live` computes them in every step, with a copy of the first weights (of adapters only, under
    LoRA). Both give the same losses."""
    rank: Rank | None = None
    """Settings of the objective `rank`."""
    contrastive: Contrastive | None = None
    """Settings of the objective `contrastive`."""
    distill: Distill | None = None
    """Settings of the objective `distill`."""
    router: Router | None = None
    """How the routers of a mixture of experts are kept balanced; default: as the model's config asks."""
    optimizer: OptimizerName = "adamw"
    """Update rule. `muon` makes updates of matrices orthogonal; AdamW updates the rest. `schedule_free` is AdamW that
    averages weights instead of lowering the learning rate; the average is evaluated and exported. `adopt` is Adam with
    a second moment that is one step older, which converges with any `betas`. `lamb` and `lars` scale each layer's
    update by its norms; `lars` takes its momentum from `betas`. `adafactor` keeps means of rows and columns instead of
    moments. See docs/optimizers.md."""
    muon: Muon | None = None
    """Settings of `muon`."""
    states: Literal["fp32", "bf16", "8bit"] = "fp32"
    """How `adamw` and `lion` store their moments: `8bit` with a scale per block of 256, a quarter of the bytes; `bf16`
    with stochastic rounding, half of them. Master weights stay fp32."""
    ema: Ema | None = None
    """Keep a moving average of the weights, which evaluations and exports use; default: none."""
    freeze_steps: int | None = number(None, least=1)
    """Steps before `onebit_adam` compresses (required by it); best longer than the learning-rate warm-up."""
    lr: float = number(3e-4, above=0)
    """Peak learning rate."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: float = number(1e-8, above=0)
    """Added to the square root of the second moment."""
    weight_decay: float = number(0.0, least=0)
    """Decoupled weight decay."""
    decay: Literal["matrices", "all"] = "matrices"
    """What weight decay applies to: matrices and tables only, so neither norms nor biases, or all parameters."""
    lr_multipliers: dict[str, float] | None = None
    """Learning rates of some parameters relative to `lr`: patterns of names (`*.embed_tokens.*`) and factors; the first
    pattern that matches a name counts."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate follows `global_batch` relative to `base_batch`."""
    base_batch: int | None = number(None, least=1)
    """Batch size that `lr` was tuned for; required by `lr_scaling`."""
    batch_ramp: BatchRamp | None = None
    """Start with a smaller batch and grow it; with `lr_scaling`, the learning rate follows the batch of each step."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "cosine_restarts", "inverse_sqrt"] = "cosine"
    """Shape of the learning rate after the warm-up. `wsd`: constant, then a linear fall over the last `decay_fraction`
    of all steps; `cosine_restarts`: `cycles` cosines in a row; `inverse_sqrt`: √(warm-up steps / step)."""
    min_lr_ratio: float = number(0.1, least=0, most=1)
    """Final learning rate relative to the peak; not for `constant` and `inverse_sqrt`."""
    decay_fraction: float | None = number(None, above=0, most=1)
    """Fraction of all steps over which `wsd` falls; default: 0.2."""
    cycles: int | None = number(None, least=1)
    """Cosines of `cosine_restarts`; default: 2."""
    warmup: float = number(0.03, least=0)
    """Warm-up: a fraction of all steps if below 1, otherwise a number of steps."""
    grad_clip: float = number(1.0, least=0)
    """Clip gradients to this global norm; 0: no clipping."""
    grad_reduce: Literal["mean", "sum"] = "mean"
    """Gradient of the mean loss over counted tokens, or that mean times the number of sequences in the batch."""
    reduce: Reduce = field(default_factory=Reduce)
    """How gradients are reduced across replicas."""
    outer: Outer | None = None
    """Exchange between the islands of `local_sgd`; default: average the weights."""
    seed: int = number(0, least=0, most=2**31 - 1)
    """Seed of weights, data order and dropout."""
    eval_every: int = number(0, least=0)
    """Steps between two evaluations on held-out data; 0: never. The best checkpoint is kept."""
    patience: int | None = number(None, least=1)
    """Stop the run after this many evaluations in a row without a better loss; default: never."""
    eval_samples: int | None = number(None, least=1)
    """Maximum number of held-out samples per evaluation; default: all."""
    sample_prompts: tuple[str, ...] = ()
    """Prompts that every evaluation continues with the likeliest tokens; the texts are in the log, eval.jsonl, W&B and
    the report."""
    sample_tokens: int = number(48, least=1)
    """Tokens that are generated for each of `sample_prompts`."""
    hang_timeout_seconds: float = number(600.0, above=0)
    """Abort the run if no rank makes progress for this long, and report the rank that the others wait for."""
    on_oom: Literal["stop", "replan"] = "stop"
    """If a device runs out of memory: stop and show the next plan, or resume with it from the last checkpoint."""
    on_spike: Literal["ignore", "rewind"] = "ignore"
    """On a loss spike (see `spike_factor`): `rewind` restores the last checkpoint and skips the batches since then."""
    spike_factor: float = number(3.0, above=1)
    """A loss this many times the median of the last 20 steps is a spike; used with `on_spike: rewind`."""

    @property
    def has_live_teacher(self) -> bool:
        """Whether a teacher predicts in every step."""
        return self.distill is not None and self.distill.predictions == "live"


@dataclass(frozen=True, kw_only=True)
class StrategySection:
    """How the work is distributed. Any axis may be fixed; the planner chooses the rest."""

    name: str = "auto"
    """`auto`, or a name from `toolkit strategies`."""
    dp: int | None = number(None, least=1)
    """Data-parallel replicas."""
    tp: int | None = number(None, least=1)
    """Tensor-parallel ranks."""
    pp: int | None = number(None, least=1)
    """Pipeline stages."""
    sp: int | None = number(None, least=1)
    """Sequence-parallel ranks (Ulysses): they exchange tokens for heads, so sp must divide the heads."""
    cp: int | None = number(None, least=1)
    """Ring-attention ranks, which pass keys and values round; with `sp`, each is a group of sp ranks."""
    sequence_sharded: bool | None = None
    """Whether tensor ranks hold their share of the tokens between sharded matrices (Megatron's sequence parallel);
    default: wherever the float64 proof of the model's type allows it."""
    ep: int | None = number(None, least=1)
    """Expert-parallel ranks."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """What ZeRO shards: 1 optimizer states, 2 + gradients, 3 + parameters."""
    zero_group: int | None = number(None, least=1)
    """Ranks that together hold one full set of sharded states."""
    zero_variant: ZeroVariant | None = None
    """How a `zero_group` smaller than `dp` is implemented: ZeRO++ hpZ or MiCS."""
    zero_quantized: ZeroQuantized | None = None
    """ZeRO++: which traffic is quantised."""
    offload: Offload | None = None
    """Keep optimizer states in host memory or on NVMe; `*_params`: parameters, too."""
    nvme_path: str | None = None
    """Directory on a local NVMe disk, for `nvme` offload."""
    micro_batch: int | None = number(None, least=1)
    """Sequences that one replica processes at a time."""
    grad_accum: int | None = number(None, least=1)
    """Micro-batches per step."""
    recompute: Recompute | None = None
    """What layers recompute in the backward pass: nothing; element-wise work (`selective`: outputs of matrix products
    and attention are kept); everything from the input (`full`); or everything, with inputs on the host (`offload`)."""
    tensor_by: TensorBy | None = None
    """What shards matrices under `tensor_parallel`: the toolkit, or DeepSpeed's AutoTP if a trial shows it exact."""
    islands: int | None = number(None, least=1)
    """Groups that synchronise every `local_steps` steps."""
    local_steps: int | Literal["auto"] | None = number(None, least=1)
    """Steps between two exchanges between islands; `auto`: as few as the measured link carries."""
    pipeline_bounds: tuple[int, ...] | None = None
    """First layer of each pipeline stage, and the number of layers, e.g. [0, 3, 6]; default: balanced by time."""
    schedule: PipelineSchedule | None = None
    """Order of a pipeline's passes: `1f1b`; `interleaved`: several chunks of the model per rank, which fills and drains
    the pipeline faster; `zero_bubble`: two chunks per rank, weight gradients computed where a rank would wait."""
    chunks: int | None = number(None, least=1)
    """Chunks of the model per pipeline rank: 1 for `1f1b`, 2 for `zero_bubble`, 2 or more for `interleaved`."""

    def fixed(self) -> dict[str, Any]:
        """The axes that the recipe fixes: plan field → value."""
        return {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) not in (None, "auto")}


AXES = tuple(f.name for f in fields(StrategySection) if f.name not in ("name", "nvme_path"))
"""Axes of a plan that a recipe may fix under `strategy`: the fields of `Plan` except strategy and precision."""


@dataclass(frozen=True, kw_only=True)
class ClusterSection:
    """A cluster, described inline or in a cluster file."""

    device: str
    """Device kind, as listed by `toolkit strategies --devices`; `cpu` for processes on the host."""
    nodes: int = number(1, least=1, most=2**20)
    """Number of nodes."""
    devices_per_node: int = number(8, least=1, most=1024)
    """Devices per node."""
    intra_gb_per_second: float | None = number(None, above=0, least=1e-6, most=1e6)
    """Bandwidth between two devices of a node, GB/s in one direction; default: that of the device kind."""
    inter_gbps_per_device: float | None = number(None, above=0, least=1e-6, most=1e6)
    """Network bandwidth per device, Gbit/s; default: that of the device kind."""
    host_memory_gib: float | None = number(None, above=0, least=1e-3, most=1e7)
    """Host memory per node, GiB."""
    nvme_gib: float = number(0.0, least=0, most=1e9)
    """Local NVMe disk space per node, GiB."""
    memory_gib: float | None = number(None, above=0, least=1e-3, most=1e6)
    """Memory of one device, GiB; default: that of the device kind."""
    memory_margin: float = number(0.04, least=0, most=0.5)
    """Share of a device's memory that plans leave free: predictions are not exact, and fragmentation varies."""
    price_per_device_hour: float | Literal["list"] | None = number(None, least=0, most=1e6)
    """Price of one device for an hour, in any currency; `list`: the dated table of list prices in US dollars."""
    matmul_tflops: float | None = number(None, above=0, least=1e-6, most=1e6)
    """Sustained matmul TFLOP/s of one device, as `toolkit probe` measures it; default: that of the device kind."""
    memory_gb_per_second: float | None = number(None, above=0, least=1e-3, most=1e7)
    """Memory bandwidth of one device, GB/s; default: that of the device kind."""
    latency_us: float | None = number(None, above=0, most=1e9)
    """Start-up time of a collective inside a node, microseconds."""
    inter_latency_us: float | None = number(None, above=0, most=1e9)
    """Start-up time of a collective across nodes, microseconds."""
    sites: int | tuple[dict, ...] = number(1, least=1, most=1024)  # type: ignore[type-arg]
    """Sites (data centres, providers) with a slow link between them: a number that divides `nodes`, or a list of
    clusters with keys like these. What a site does not give is taken from here. Unequal sites are asynchronous islands;
    each gets a plan of its own."""
    site_gbps: float | None = number(None, above=0, least=1e-6, most=1e6)
    """Bandwidth of the link between two sites, or of one site to the others, Gbit/s; required with `sites`."""
    site_latency_ms: float = number(30.0, least=0, most=1e6)
    """Start-up time of a collective across sites, milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saving and resuming."""

    every: int = number(0, least=0)
    """Steps between two checkpoints; 0: never."""
    keep: int = number(3, least=1)
    """Number of newest checkpoints to keep."""
    keep_best: int = number(1, least=1)
    """Number of checkpoints to keep besides these: those with the lowest losses of an evaluation (`train.eval_every`);
    `toolkit export --best N` exports them."""
    resume: str = "auto"
    """`auto`: resume from the newest checkpoint of the run directory; `none`: start afresh; or a checkpoint path."""
    asynchronous: bool = False
    """Copy the state to host memory and write it while training continues; needs host memory for the copy."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete training job."""

    name: str = "run"
    """Name of the run directory and of the W&B run: letters, digits, `.`, `_`, `-`."""
    model: Model
    """The Hugging Face model."""
    data: Data = field(default_factory=Data)
    """The training data."""
    train: Train = field(default_factory=Train)
    """Optimisation."""
    strategy: StrategySection = field(default_factory=StrategySection)
    """How the work is distributed."""
    cluster: str | ClusterSection = "auto"
    """`auto` (this machine), a name in configs/clusters, a path, or a mapping."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """Saving and resuming."""
    metrics: Metrics = field(default_factory=Metrics)
    """What is recorded."""
    output: str = "runs"
    """Directory that contains the run directories."""
