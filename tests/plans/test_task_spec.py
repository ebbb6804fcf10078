"""Classifiers, vision models and encoder-decoders: the planner counts what transformers builds."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from toolkit.errors import BadInput, NoPlanFits
from toolkit.plans.job import BART_FAMILY, image_tokens, task_spec
from toolkit.recipe.file import make_recipe
from toolkit.recipe.model_section import Model
from toolkit.runtime.models.build import skeleton
from toolkit.sessions.preflight import check
from toolkit.sessions.resolve import resolve

SMALL_T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


@pytest.mark.parametrize(
    ("task", "config"),
    [
        ("classification", {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}),
        ("classification", {"model_type": "roberta", "hidden_size": 48, "num_attention_heads": 4}),
        ("classification", {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "pad_token_id": 0}),
        ("embedding", {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}),
        ("embedding", {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}),
        ("embedding", {"model_type": "llama", "hidden_size": 64, "tie_word_embeddings": True}),
        ("image-classification", {"model_type": "vit"}),
        ("image-classification", {"model_type": "vit", "image_size": 32, "patch_size": 8, "hidden_size": 48}),
        ("seq2seq", {"model_type": "t5", **SMALL_T5}),
        ("seq2seq", {"model_type": "t5", **SMALL_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
        ("seq2seq", {"model_type": "mt5", **SMALL_T5, "num_decoder_layers": 3}),
        ("seq2seq", {"model_type": "umt5", **SMALL_T5}),
        ("seq2seq", {"model_type": "bart", "vocab_size": 100, "d_model": 32, "encoder_layers": 2}),
        ("seq2seq", {"model_type": "bart", "vocab_size": 100, "d_model": 32, "tie_word_embeddings": False}),
        *(("seq2seq", {"model_type": kind}) for kind in BART_FAMILY),
    ],
)
def test_parameters_are_counted_exactly(task: str, config: dict[str, Any]) -> None:
    section = Model(config=config, init="scratch", task=task, num_labels=None if task == "seq2seq" else 7)  # type: ignore[arg-type]
    built = sum(parameter.numel() for parameter in skeleton(section).parameters())
    assert task_spec(config, section).params == built


def test_an_image_is_its_patches() -> None:
    assert image_tokens({"model_type": "vit"}) == 197


def test_types_that_can_not_be_planned_are_named() -> None:
    with pytest.raises(BadInput, match="llama can't be planned for images; these can: vit"):
        task_spec({"model_type": "llama"}, Model(config={}, task="image-classification"))


@pytest.mark.parametrize(
    ("kind", "task", "strategy", "reason"),
    [
        ("llama", "classification", "{name: sequence_parallel, sp: 1, cp: 2}", "one result of a complete text"),
        ("t5", "seq2seq", "{name: sequence_parallel, sp: 2}", "splits the tokens of one sequence"),
        ("bert", "classification", "{name: tensor_parallel, tp: 2, tensor_by: autotp}", "AutoTP is tried on causal"),
    ],
)
def test_splits_that_a_task_can_not_have_are_refused_with_the_reason(
    kind: str, task: str, strategy: str, reason: str
) -> None:
    given = {"model": {"config": {"model_type": kind}}, "train": {"steps": 1, "global_batch": 4}}
    data = f"data={{path: synthetic, format: {task}, tokenizer: bytes, seq_len: 64}}"
    with pytest.raises(NoPlanFits, match=reason):
        _ = resolve(make_recipe(given, [data, f"strategy={strategy}"]), 2).chosen


def test_4_bits_without_bitsandbytes_or_weights_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else found(name))
    given = {"model": {"config": {"model_type": "llama"}, "lora": {"quantize": "4bit"}}, "train": {"steps": 1}}
    with pytest.raises(BadInput, match=r"bitsandbytes: pip install 'zero-toolkit\[qlora\]', or use none"):
        check(make_recipe(given, ["data.tokenizer=bytes"]), {}, print)
