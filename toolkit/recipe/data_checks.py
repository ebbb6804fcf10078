"""Checks of the data section that involve several keys."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.recipe.model_section import Model, Task
from toolkit.recipe.objective_sections import SCORED, Objective
from toolkit.recipe.schema import show
from toolkit.recipe.sections import Data, Format, Train

PACKED_FORMATS = ("text", "instruction", "chat", "preference")
ITEMS = "items:"
"""Start of the name of a tokenizer that takes item ids as they are."""


def task_of(kind: Format, objective: Objective | None = None) -> Task:
    """The task that a data format and an objective train."""
    if objective in SCORED:
        return "classification"
    if kind in ("classification", "image-classification", "seq2seq"):
        return kind
    return "embedding" if kind == "pairs" else "causal-lm"


def is_packed(data: Data, objective: Objective | None) -> bool:
    """Whether several documents share a row. A head that scores a text has one text per row."""
    return data.format in PACKED_FORMATS and data.packing and objective not in SCORED


def texts_per_sample(data: Data, objective: Objective | None) -> int:
    """Rows that a sample of the global batch has, each of up to `data.seq_len` tokens."""
    if objective == "rank":
        return data.candidates
    if objective == "contrastive":
        return 2 + data.negatives
    return 2 if objective == "reward" else 1


def source_weights(path: str | dict[str, float]) -> dict[str, float]:
    """The sources of `data.path` with their weights; a single source has weight 1."""
    return {path: 1.0} if isinstance(path, str) else path


def data_problems(data: Data, train: Train, model: Model) -> Iterator[Problem]:
    """Conflicting, unused and missing settings of the data section."""
    yield from _mixture_problems(data)
    task = task_of(data.format, train.objective)
    if model.task is not None and model.task != task:
        yield Problem("model.task", f"{model.task} given; data.format {data.format} trains {task}")
    if data.packing_method == "stream" and data.format != "text":
        yield Problem("data.packing_method", f"stream given; it needs data.format text, not {data.format}")
    scored = train.objective in SCORED and model.num_labels == 1
    if model.num_labels is not None and "classification" not in data.format and not scored:
        yield Problem("model.num_labels", f"unused with data.format {data.format}; remove it")
    if data.context_column is not None and data.format != "instruction":
        yield Problem("data.context_column", f"unused with data.format {data.format}; remove it")
    yield from _eval_problems(data, train)
    yield from _streaming_problems(data, train)
    yield from _preference_problems(data, train.objective)
    yield from _group_problems(data)
    if train.objective == "distill" and data.streaming:
        yield Problem("data.streaming", "the teacher's predictions are kept by row, and a stream has none; remove it")
    if train.objective == "contrastive" and model.lora is not None and model.lora.dropout:
        what = f"{model.lora.dropout:g} given; contrastive computes embeddings twice, which must not differ; use 0"
        yield Problem("model.lora.dropout", what)
    yield from _trial_problems(data)
    yield from _turn_problems(data)
    yield from _text_problems(data, train)


def _text_problems(data: Data, train: Train) -> Iterator[Problem]:
    """Settings that need a model of texts that predicts the next token."""
    task = task_of(data.format, train.objective)
    if train.neftune_alpha is not None and train.objective is not None:
        what = f"is for training without an objective: {train.objective} would compare passes with different noise"
        yield Problem("train.neftune_alpha", f"{what}; remove it")
    elif train.neftune_alpha is not None and task not in ("causal-lm", "classification"):
        yield Problem("train.neftune_alpha", f"is for decoders and classifiers of texts, not for {task}; remove it")
    if train.sample_prompts and task != "causal-lm":
        yield Problem("train.sample_prompts", f"needs a model that predicts the next token, not {task}; remove it")
    if train.sample_prompts and data.path == "synthetic" and data.format == "text":
        yield Problem("train.sample_prompts", "synthetic text has no tokenizer; remove it, or use another data.path")
    if any(not prompt.strip() for prompt in train.sample_prompts):
        yield Problem("train.sample_prompts", "an empty prompt given; at least one word is required")
    if train.sample_tokens != 48 and not train.sample_prompts:
        yield Problem("train.sample_tokens", "unused without train.sample_prompts; remove it")


def _turn_problems(data: Data) -> Iterator[Problem]:
    if data.format != "chat":
        for key, given, usual in (("train_on", data.train_on, "all"), ("roles", data.roles, ("assistant",))):
            if given != usual:
                yield Problem(f"data.{key}", f"unused with data.format {data.format}; remove it, or use chat")
    elif not data.roles:
        yield Problem("data.roles", "empty: nothing would be trained on; give assistant, or other roles")


def _trial_problems(data: Data) -> Iterator[Problem]:
    if data.max_samples is None:
        return
    if data.streaming:
        yield Problem("data.max_samples", "unused with data.streaming, which has no known length; use train.steps")
    if data.path == "synthetic" and data.format == "text":
        yield Problem("data.max_samples", "unused: synthetic text has no documents; use train.steps")


def _mixture_problems(data: Data) -> Iterator[Problem]:
    if not isinstance(data.path, dict):
        return
    if not data.path:
        yield Problem("data.path", "an empty mapping given; at least one source with a weight is required")
    for source, weight in data.path.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not isinstance(source, str) or not is_number or weight <= 0:
            given = f"{show(source)}: {show(weight)} given"
            yield Problem("data.path", f"{given}; a source and a weight above 0 are required")
        elif source == "synthetic" and data.format == "text":
            yield Problem("data.path", "synthetic text can't be part of a mixture; give files or hub ids")


def _preference_problems(data: Data, objective: Objective | None) -> Iterator[Problem]:
    if data.format in ("preference", "pairs", "ranking") and isinstance(data.path, dict):
        yield Problem("data.path", f"several sources given; {data.format} data comes from one source")
    if data.format != "preference":
        return
    if not data.packing and objective not in SCORED:
        yield Problem("data.packing", "false given; both answers of a pair share a row, so preference data is packed")
    if data.streaming:
        yield Problem("data.streaming", "preference data can't be streamed; remove it")


def _group_problems(data: Data) -> Iterator[Problem]:
    """Settings of formats whose rows hold several texts."""
    for key, kind, default in (("negatives", "pairs", 0), ("candidates", "ranking", 8)):
        if getattr(data, key) != default and data.format != kind:
            yield Problem(f"data.{key}", f"unused with data.format {data.format}; remove it")
    if (data.tokenizer or "").startswith(ITEMS):
        size = (data.tokenizer or "").removeprefix(ITEMS)
        if not size.isdecimal() or not 0 < int(size) < 2**31 - 1:
            yield Problem(
                "data.tokenizer", f"{show(data.tokenizer)} given; items:N with the number of items is required"
            )
        if data.format != "pairs":
            yield Problem("data.tokenizer", f"item ids need data.format pairs, not {data.format}")


def _streaming_problems(data: Data, train: Train) -> Iterator[Problem]:
    if not data.streaming:
        return
    if train.epochs is not None:
        yield Problem("train.epochs", "a stream has no known length; give train.steps")
    if data.format not in PACKED_FORMATS or not data.packing:
        yield Problem("data.streaming", f"needs packing and one of {', '.join(PACKED_FORMATS)}")
    if data.eval_fraction:
        yield Problem("data.eval_fraction", "a stream can't be split; use data.eval_path")
    if data.path == "synthetic":
        yield Problem("data.streaming", "synthetic data can't be streamed; remove it")


def _eval_problems(data: Data, train: Train) -> Iterator[Problem]:
    held_out = data.eval_path is not None or data.eval_fraction > 0
    if data.eval_path is not None and data.eval_fraction > 0:
        yield Problem("data", "eval_path and eval_fraction exclude each other; give one of them")
    if train.eval_every and not held_out:
        yield Problem("train.eval_every", "needs held-out data: give data.eval_path or data.eval_fraction")
    if held_out and not train.eval_every:
        key = "data.eval_path" if data.eval_path is not None else "data.eval_fraction"
        yield Problem(key, "unused while train.eval_every is 0; set it, or remove this key")
    for key, given in (
        ("eval_samples", train.eval_samples),
        ("patience", train.patience),
        ("sample_prompts", train.sample_prompts or None),
    ):
        if given is not None and not train.eval_every:
            yield Problem(f"train.{key}", "unused while train.eval_every is 0; set it, or remove this key")
    if data.eval_fraction > 0 and data.path == "synthetic" and data.format == "text":
        yield Problem("data.eval_fraction", "synthetic text has no documents to hold out; use another data.path")
