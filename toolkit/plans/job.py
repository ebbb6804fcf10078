"""Build the job of a recipe: the shape of the model, the cluster, the workload and the fixed axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from toolkit.clusters.reader import read_cluster
from toolkit.errors import BadInput, Problem
from toolkit.models.architectures.dense import BERT
from toolkit.models.spec import ModelSpec, load_model_config, read_model_config
from toolkit.plans.deepspeed_rules import job_problems
from toolkit.plans.exchange import exchange_of
from toolkit.plans.pipeline_bounds import chunks_problem
from toolkit.plans.pipeline_orders import micro_batches_problem
from toolkit.plans.plan import Job, Workload
from toolkit.plans.router_balance import balance_of, balance_problems
from toolkit.recipe.batch_sections import Outer
from toolkit.recipe.data_checks import texts_per_sample
from toolkit.recipe.model_section import ONE_RESULT, Model
from toolkit.recipe.objective_sections import ANSWERS, PROMPT_SHARE, TWICE
from toolkit.recipe.sections import Recipe, Train
from toolkit.resources import CONFIGS
from toolkit.units import GIB

HOPPER = ("H100", "H200", "H800", "H20", "GH200")
"""Devices that flash-attn 3 has kernels for."""


def make_job(recipe: Recipe, nproc: int | None = None) -> Job:
    """Everything that planning depends on; raises `BadInput` if model, data and cluster do not match."""
    config = raw_config(recipe.model)
    model = task_spec(config, recipe.model)
    shares = recipe.train.objective in ANSWERS and not model.moe_layers
    job = Job(
        model=model,
        cluster=read_cluster(recipe.cluster, nproc),
        workload=Workload(
            global_batch=recipe.train.global_batch,
            seq_len=_sample_tokens(recipe, config),
            precision=recipe.model.precision,
            optimizer=recipe.train.optimizer,
            states=recipe.train.states,
            averaged=recipe.train.ema is not None,
            flash_attention=recipe.model.attention != "eager",
            flash_generation=3 if recipe.model.attention == "flash_attention_3" else 2,
            fused_kernels=recipe.model.kernels == "liger",
            compiled=recipe.model.compile == "layers",
            lora_rank=recipe.model.lora.rank if recipe.model.lora else 0,
            lora_targets=_lora_targets(recipe.model),
            quantized_base=recipe.model.lora is not None and recipe.model.lora.quantize == "4bit",
            grad_clip=recipe.train.grad_clip,
            exchange=exchange_of(recipe.train.outer or Outer(), recipe.strategy.local_steps == "auto"),
            reduce=recipe.train.reduce,
            steps=recipe.train.steps or 0,
            ramp_start=recipe.train.batch_ramp.start if recipe.train.batch_ramp else 0,
            whole_logits=recipe.train.objective == "distill",
            complete_texts=recipe.model.task in ONE_RESULT,
            texts=texts_per_sample(recipe.data, recipe.train.objective),
            shared_prompt=PROMPT_SHARE if shares else 0.0,
            first_passes=int(recipe.train.reference == "live") + int(recipe.train.objective in TWICE),
            live_reference=recipe.train.reference == "live",
            teacher=teacher_of(recipe.train) if recipe.train.has_live_teacher else None,
            balance=balance_of(recipe.train.router, config),
        ),
        fixed=_fixed(recipe),
    )
    problems = [
        *_length_problems(recipe, job.model),
        *_problems(job),
        *_schedule_problems(job, recipe.strategy.name),
        *_kernel_problems(recipe.model, job),
        *_teacher_problems(recipe.train, job),
    ]
    problems += job_problems(job)
    problems += balance_problems(recipe.train.router, config, job.model.experts, recipe.model.precision)
    if problems:
        raise BadInput(recipe.name, problems)
    return job


ATTENTION_LAYERS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value", "dense", "c_attn"})
"""Usual names of the linear layers of attention."""


def _lora_targets(section: Model) -> str:
    """Layers with adapters, as far as the cost model tells them apart."""
    given = section.lora.targets if section.lora else "auto"
    names = {given} if isinstance(given, str) else set(given)
    if names == {"q_proj", "v_proj"}:
        return "qv"
    return "attention" if names <= ATTENTION_LAYERS else "all"


def raw_config(section: Model) -> Mapping[str, Any]:
    """The Hugging Face config of the recipe's model, as plain JSON values."""
    if section.config is not None:
        return section.config
    assert section.path is not None
    return load_model_config(section.path, models_dir=CONFIGS / "models")


def teacher_of(train: Train) -> ModelSpec:
    """The teacher of a distillation."""
    assert train.distill is not None
    return read_model_config(raw_config(Model(path=train.distill.teacher, config=train.distill.teacher_config)))


def _teacher_problems(train: Train, job: Job) -> Iterator[Problem]:
    """Each rank holds the complete teacher while it predicts before the run."""
    if train.distill is None or train.has_live_teacher:
        return
    needed = teacher_of(train).params * (4 if job.workload.precision == "fp32" else 2)
    if needed > (limit := job.cluster.device.memory_bytes):
        yield Problem(
            "train.distill.teacher",
            f"its weights take {needed / GIB:.1f} GiB on each rank before the run; a device has {limit / GIB:.1f} GiB; "
            "use a smaller teacher, or train.distill.predictions: live with ZeRO 3 or tensor parallel, which shard it",
        )


def _sample_tokens(recipe: Recipe, config: Mapping[str, Any]) -> int:
    """Tokens that a sample computes. Attention of several texts is counted as that of one long text."""
    if recipe.model.task == "image-classification":
        return image_tokens(config)
    return recipe.data.seq_len * texts_per_sample(recipe.data, recipe.train.objective)


def _length_problems(recipe: Recipe, model: ModelSpec) -> Iterator[Problem]:
    tokens = model.max_positions if recipe.model.task == "image-classification" else recipe.data.seq_len
    if model.max_positions and tokens > model.max_positions:
        yield Problem("data.seq_len", f"{tokens} tokens given; the model takes at most {model.max_positions}")


def _problems(job: Job) -> list[Problem]:
    problems = []
    devices = job.cluster.devices
    islands = job.fixed.get("islands", 1)
    if devices % islands:
        problems.append(Problem("strategy.islands", f"{islands} given; must divide the {devices} devices"))
    devices = math.prod(job.fixed.get(axis, 1) for axis in ("tp", "pp", "sp", "cp"))
    if job.cluster.devices % devices:
        problems.append(
            Problem("strategy", f"tp·pp·sp·cp = {devices} does not divide the {job.cluster.devices} devices")
        )
    return [*problems, *_expert_problems(job)]


def _expert_problems(job: Job) -> Iterator[Problem]:
    """A number of expert ranks that no plan can have."""
    ep, experts = job.fixed.get("ep", 1), job.model.experts
    if ep == 1:
        return
    if not experts:
        yield Problem("strategy.ep", f"{ep} given, but {job.model.model_type} has no experts: it is dense; remove it")
    elif experts % ep:
        fitting = [size for size in range(2, experts + 1) if experts % size == 0 and job.cluster.devices % size == 0]
        advice = f"use {', '.join(map(str, fitting))}" if fitting else "remove it"
        yield Problem("strategy.ep", f"{ep} given; it must divide the {experts} experts; {advice}")


def _fixed(recipe: Recipe) -> dict[str, Any]:
    """Axes that the recipe fixes. Decoder layers read the encoder's complete output, and embeddings are made of all
    tokens: no shares of tokens there."""
    whole = {"sequence_sharded": False} if recipe.model.task in ("seq2seq", "embedding") else {}
    return {**whole, **recipe.strategy.fixed()}


def _schedule_problems(job: Job, strategy: str) -> list[Problem]:
    """Pipeline schedules that the model or the batch can't fill, with the nearest that works."""
    fixed, layers = job.fixed, job.model.layers
    pp, schedule, chunks = fixed.get("pp"), fixed.get("schedule"), fixed.get("chunks")
    if found := chunks_problem(layers, pp, schedule, chunks):
        return [Problem(*found)]
    schedule = schedule or ("interleaved" if chunks and chunks > 1 else None)
    if schedule in (None, "1f1b") or pp is None:
        return []
    if "grad_accum" in fixed:
        problem = micro_batches_problem(schedule, pp, fixed["grad_accum"])
        return [Problem("strategy.grad_accum", problem)] if problem else []
    if "dp" not in fixed and strategy != "pipeline" and not {"tp", "sp"} <= fixed.keys():
        return []  # how many replicas share the batch is open
    replica = math.prod(fixed.get(axis, 1) for axis in ("pp", "tp", "sp", "cp"))
    dp = fixed.get("dp") or job.cluster.devices // replica or 1
    most = job.workload.global_batch // (dp * fixed.get("micro_batch", 1))
    problem = micro_batches_problem(schedule, pp, most) if most < 2 * pp or "micro_batch" in fixed else None
    key = "strategy.micro_batch" if "micro_batch" in fixed else "train.global_batch"
    return [Problem(key, f"{problem} (global batch / dp / micro_batch)")] if problem else []


def _kernel_problems(section: Model, job: Job) -> list[Problem]:
    """Kernels that the device can't run, or that exclude each other."""
    device = job.cluster.device
    if section.kernels == "liger" and section.compile == "layers":
        return [Problem("model.compile", "layers given with kernels: liger; compiled layers make their own; use none")]
    if not section.attention.startswith("flash_attention"):
        return []
    generation, has = "Ampere's generation or later", device.flash_attention
    if section.attention == "flash_attention_3" and device.backend == "cuda":
        generation, has = "Hopper's generation", device.name.startswith(HOPPER)
    if has:
        return []
    what = f"{section.attention} given; it needs a device of {generation}, not {device.name}; use auto"
    return [Problem("model.attention", what)]


DEFAULT_LABELS = 2
"""Number of classes of a Hugging Face config that names none."""
VIT = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "image_size": 224, "patch_size": 16, "num_channels": 3,
}  # fmt: skip
T5 = {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
MT5 = T5 | {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6}
T5_FAMILY = {"t5": T5, "mt5": MT5, "umt5": MT5}
"""Encoder-decoders of T5's kind and transformers' defaults of their sizes."""
BART = {
    "vocab_size": 50265, "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "max_position_embeddings": 1024,
}  # fmt: skip
SMALL = {"d_model": 512, "encoder_layers": 8, "decoder_layers": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
BLENDERBOT = {
    "vocab_size": 8008, "d_model": 2560, "encoder_layers": 2, "decoder_layers": 24, "encoder_attention_heads": 32,
    "encoder_ffn_dim": 10240, "decoder_ffn_dim": 10240, "max_position_embeddings": 128,
}  # fmt: skip
PLBART = {
    "vocab_size": 50005, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
    "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
}  # fmt: skip
BART_FAMILY: dict[str, tuple[dict[str, int], int | None, int, int]] = {
    "bart": ({}, 2, 1, 0),
    "mvp": ({"vocab_size": 50267}, 2, 1, 0),
    "plbart": (PLBART, 2, 1, 0),
    "mbart": ({}, 2, 1, 1),
    "pegasus": ({}, 0, 0, 1),
    "marian": ({"vocab_size": 58101}, 0, 0, 0),
    "m2m_100": ({"vocab_size": 128112}, None, 0, 1),
    "blenderbot": (BLENDERBOT, 0, 0, 1),
    "blenderbot-small": (SMALL | {"max_position_embeddings": 512}, 0, 1, 0),
}
"""Encoder-decoders of BART's kind: sizes in which transformers' defaults differ from BART's, further rows of the table
of positions (None: a formula without parameters), norms after the embeddings and after the last layer of each half."""
T5_BUCKETS = 32
Reader = Callable[[Mapping[str, Any], int], ModelSpec]
"""Reads a config and a number of classes into a spec."""


def task_spec(config: Mapping[str, Any], section: Model) -> ModelSpec:
    """The spec of the recipe's model with the head of its task."""
    if section.task == "classification":
        return _classifier(read_model_config(config), num_labels(config, section))
    if section.task == "image-classification":
        return _of_type(config, {"vit": _vit}, "images")(config, num_labels(config, section))
    if section.task == "seq2seq":
        known = dict.fromkeys(T5_FAMILY, _t5) | dict.fromkeys(BART_FAMILY, _bart)
        return _of_type(config, known, "seq2seq")(config, 0)
    if section.task == "embedding":
        return _without_head(read_model_config(config))
    return read_model_config(config)


def num_labels(config: Mapping[str, Any], section: Model) -> int:
    """Number of classes of the head."""
    named = config.get("id2label")
    return int(section.num_labels or config.get("num_labels") or len(named or ()) or DEFAULT_LABELS)


def image_tokens(config: Mapping[str, Any]) -> int:
    """Tokens per image: its patches and the class token."""
    sizes = _sizes(config, VIT)
    return (sizes["image_size"] // sizes["patch_size"]) ** 2 + 1


def _of_type(config: Mapping[str, Any], known: Mapping[str, Reader], what: str) -> Reader:
    kind = config.get("model_type")
    if kind not in known:
        raise BadInput("model", f"{kind} can't be planned for {what}; these can: {', '.join(known)}")
    return known[str(kind)]


def _sizes(config: Mapping[str, Any], defaults: Mapping[str, int]) -> dict[str, int]:
    found = {key: config.get(key, value) for key, value in defaults.items()}
    wrong = [key for key, value in found.items() if not isinstance(value, int) or isinstance(value, bool) or value < 1]
    if wrong:
        raise BadInput(f"model config: {wrong[0]}", f"{found[wrong[0]]!r} given; a whole number above 0 is required")
    return found


def _classifier(base: ModelSpec, labels: int) -> ModelSpec:
    width = base.hidden
    if base.model_type in BERT:
        head = width * (width + 1) + (width + 1) * labels
        base = replace(base, padding_masks=True)
    else:
        head = base.head_params - (0 if base.tied_embeddings else width * base.vocab) + width * labels
    return replace(base, vocab=labels, head_params=head, tied_embeddings=False)


def _without_head(base: ModelSpec) -> ModelSpec:
    """The layers alone; what stands in the place of logits is as wide as the hidden states."""
    head = (
        0 if base.model_type in BERT else base.head_params - (0 if base.tied_embeddings else base.hidden * base.vocab)
    )
    return replace(
        base, vocab=base.hidden, head_params=head, tied_embeddings=False, residual_dropout=0.0, embedding_dropout=0.0,
    )  # fmt: skip


def _vit(config: Mapping[str, Any], labels: int) -> ModelSpec:
    s = _sizes(config, VIT)
    width, inner = s["hidden_size"], s["intermediate_size"]
    tokens = image_tokens(config)
    bias = 3 * width if config.get("qkv_bias", True) else 0
    layer = 4 * width * width + width + bias + _mlp(width, inner) + 4 * width
    return _dense(
        [layer] * s["num_hidden_layers"], model_type="vit", hidden=width, heads=s["num_attention_heads"],
        head_dim=width // s["num_attention_heads"], ffn=inner, gated_mlp=False, vocab=labels, max_positions=tokens,
        tied_embeddings=False, head_params=2 * width + (width + 1) * labels,
        embedding_params=(tokens + 1) * width + (s["patch_size"] ** 2 * s["num_channels"] + 1) * width,
    )  # fmt: skip


def _t5(config: Mapping[str, Any], labels: int) -> ModelSpec:
    kind = str(config["model_type"])
    s = _sizes(config, T5_FAMILY[kind])
    width, usual = s["d_model"], "relu" if kind == "t5" else "gated-gelu"
    gated = str(config.get("feed_forward_proj", usual)).startswith("gated")
    attention = 4 * width * s["num_heads"] * s["d_kv"] + width
    inner = (3 if gated else 2) * width * s["d_ff"] + width
    layers = [attention + inner] * s["num_layers"]
    layers += [2 * attention + inner] * int(config.get("num_decoder_layers") or s["num_layers"])
    bias = int(config.get("relative_attention_num_buckets", T5_BUCKETS)) * s["num_heads"]
    for number in range(len(layers)) if kind == "umt5" else (0, s["num_layers"]):
        layers[number] += bias
    table = s["vocab_size"] * width  # transformers ties the head to it, whatever tie_word_embeddings says
    return _dense(
        layers, model_type=kind, encoder_layers=s["num_layers"], hidden=width, heads=s["num_heads"],
        residual_dropout=_rate(config, "dropout_rate"), embedding_dropout=_rate(config, "dropout_rate"),
        head_dim=s["d_kv"], ffn=s["d_ff"], gated_mlp=gated, vocab=s["vocab_size"], max_positions=0,
        tied_embeddings=True, head_params=2 * width, embedding_params=table,
    )  # fmt: skip


def _bart(config: Mapping[str, Any], labels: int) -> ModelSpec:
    kind = str(config["model_type"])
    defaults, more_rows, embedding_norm, last_norm = BART_FAMILY[kind]
    s = _sizes(config, BART | defaults)
    width, table = s["d_model"], s["vocab_size"] * s["d_model"]
    attention = 4 * width * (width + 1) + 2 * width
    encoder = attention + _mlp(width, s["encoder_ffn_dim"]) + 2 * width
    decoder = 2 * attention + _mlp(width, s["decoder_ffn_dim"]) + 2 * width
    rows = 0 if more_rows is None else s["max_position_embeddings"] + more_rows
    tied = config.get("tie_word_embeddings") is not False  # else both halves and the head have tables of their own
    return _dense(
        [encoder] * s["encoder_layers"] + [decoder] * s["decoder_layers"], model_type=kind,
        encoder_layers=s["encoder_layers"], hidden=width, heads=s["encoder_attention_heads"],
        residual_dropout=_rate(config, "dropout"), embedding_dropout=_rate(config, "dropout"), padding_masks=True,
        head_dim=width // s["encoder_attention_heads"], ffn=s["encoder_ffn_dim"], gated_mlp=False,
        vocab=s["vocab_size"], max_positions=s["max_position_embeddings"], tied_embeddings=tied,
        head_params=4 * last_norm * width + (0 if tied else table),
        embedding_params=(1 if tied else 3) * table + 2 * (rows + 2 * embedding_norm) * width,
    )  # fmt: skip


def _rate(config: Mapping[str, Any], key: str) -> float:
    """Share that is dropped; all encoder-decoders have the same default."""
    given = config.get(key, 0.1)
    return float(given) if isinstance(given, int | float) else 0.0


def _mlp(width: int, inner: int) -> int:
    return 2 * width * inner + inner + width


def _dense(layers: list[int], **shape: Any) -> ModelSpec:
    """A model without experts whose keys and values have as many heads as its queries; `layers` are parameters."""
    params = tuple(layers)
    return ModelSpec(
        layers=len(params), layer_params=params, layer_active_params=params, kv_heads=shape["heads"], **shape
    )
