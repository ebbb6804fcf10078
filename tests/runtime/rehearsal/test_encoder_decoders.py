"""Rehearsals of encoder-decoders, against the memory model."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.rehearsals import WORST_BOUND
from toolkit.errors import NotRehearsable
from toolkit.recipe.file import make_recipe
from toolkit.sessions.rehearse import rehearse
from toolkit.sessions.resolve import Resolved, resolve

T5 = {
    "model_type": "t5", "vocab_size": 8192, "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 8,
    "num_decoder_layers": 6, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
}  # fmt: skip
H100 = "cluster={device: H100-SXM5-80GB, devices_per_node: 4}"


def resolved(config: dict[str, Any], nproc: int, *overrides: str) -> Resolved:
    mapping = {
        "name": "pairs",
        "model": {"config": dict(config), "task": "seq2seq", "precision": "fp32", "kernels": "none", "init": "scratch"},
        "data": {"path": "synthetic", "format": "seq2seq", "tokenizer": "bytes", "seq_len": 64},
        "train": {"global_batch": 8, "steps": 2, "lr": 1e-3},
        "metrics": {"console": False, "wandb": {"mode": "disabled"}},
    }
    return resolve(make_recipe(mapping, (*overrides, "strategy.recompute=none")), nproc)


@pytest.mark.parametrize(
    "strategy",
    [
        "{name: data_parallel, micro_batch: 2}",
        "{name: zero, zero_stage: 1, micro_batch: 2}",
        "{name: zero, zero_stage: 3, zero_variant: plain, micro_batch: 2}",
        "{name: tensor_parallel, tp: 4, micro_batch: 2}",
        "{name: pipeline, pp: 4, schedule: 1f1b, micro_batch: 2}",
        "{name: hybrid, tp: 2, pp: 2, schedule: 1f1b, micro_batch: 2}",
    ],
)
def test_a_t5_takes_what_is_predicted(strategy: str) -> None:
    """Its bias of positions crosses boundaries; every tensor rank has all activations and complete logits."""
    run = resolved(T5, 4, f"strategy={strategy}", H100, "model.precision=bf16", "data.seq_len=512")
    result = rehearse(run)
    assert result.mismatches == ()
    found = max(role.step.device_peak_bytes for role in result.roles)
    assert result.predicted_bytes == pytest.approx(found, rel=WORST_BOUND)


def test_chunks_of_an_encoder_decoder_are_refused() -> None:
    """A rank's chunks receive other shapes each."""
    run = resolved(T5, 4, "strategy={name: pipeline, pp: 2, schedule: interleaved, chunks: 2, micro_batch: 1}", H100)
    with pytest.raises(NotRehearsable, match="several chunks"):
        rehearse(run)
