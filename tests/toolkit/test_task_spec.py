"""Classifiers, vision models and encoder-decoders: the planner counts what transformers builds."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.errors import BadInput
from toolkit.recipe import Model
from toolkit.runtime.model import skeleton
from toolkit.task_spec import image_tokens, task_spec

SMALL_T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


@pytest.mark.parametrize(
    ("task", "config"),
    [
        ("classification", {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}),
        ("classification", {"model_type": "roberta", "hidden_size": 48, "num_attention_heads": 4}),
        ("classification", {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "pad_token_id": 0}),
        ("image-classification", {"model_type": "vit"}),
        ("image-classification", {"model_type": "vit", "image_size": 32, "patch_size": 8, "hidden_size": 48}),
        ("seq2seq", {"model_type": "t5", **SMALL_T5}),
        ("seq2seq", {"model_type": "t5", **SMALL_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
        ("seq2seq", {"model_type": "bart", "vocab_size": 100, "d_model": 32, "encoder_layers": 2}),
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
