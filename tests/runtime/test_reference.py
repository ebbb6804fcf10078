"""The reference of preference data: computed once, resumed where it stopped, never trusted when damaged."""

from __future__ import annotations

import json
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import Trainer
from toolkit.recipe.file import make_recipe
from toolkit.runtime.data.input_spec import input_spec_of
from toolkit.runtime.data.load import load_data
from toolkit.runtime.data.pairs import PairRows
from toolkit.runtime.reference import TENSOR, ReferenceFile
from toolkit.runtime.supervision.warm_pool import enter_worker

TINY = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 260,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 192}  # fmt: skip


@pytest.fixture
def pairs(tmp_path: Path) -> list[str]:
    """Overrides: a second of preference tuning on synthetic pairs."""
    data = f"data={{path: synthetic, format: preference, tokenizer: bytes, seq_len: 192, cache: {tmp_path}}}"
    return [data, f"model.config={json.dumps(TINY)}", "train.objective=dpo"]


def cached(cache: Path) -> np.ndarray:
    (file,) = cache.glob("reference-*.safetensors")
    return load_file(file)[TENSOR]


@pytest.mark.slow
def test_two_ranks_compute_what_one_does_and_the_first_loss_is_that_of_equals(
    pairs: list[str], train: Trainer, tmp_path: Path
) -> None:
    alone = train(*pairs, nproc=1)
    first = cached(tmp_path)
    assert np.isfinite(first).all()
    assert alone.records[0]["loss"] == pytest.approx(np.log(2), abs=1e-6), "before any update model and reference agree"
    for file in tmp_path.glob("reference-*"):
        file.unlink()
    other = train(*pairs, "strategy.name=zero", "strategy.zero_stage=3", nproc=2)
    np.testing.assert_allclose(cached(tmp_path), first, rtol=2e-6)
    assert other.losses == pytest.approx(alone.losses, rel=2e-5)


@pytest.mark.slow
def test_a_pass_resumes_where_it_stopped(pairs: list[str], train: Trainer, tmp_path: Path) -> None:
    """Only what is missing is computed: a changed value that is known stays."""
    train(*pairs, nproc=1)
    (path,) = tmp_path.glob("reference-*.safetensors")
    complete = cached(tmp_path)
    partial = complete.copy()
    partial[len(partial) // 2 :] = np.nan
    partial[0] -= 1.0
    ReferenceFile(path, print).write(partial)
    train(*pairs, nproc=1)
    found = cached(tmp_path)
    assert found[0] == complete[0] - 1.0
    np.testing.assert_array_equal(found[1:], complete[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "strategy", "more"),
    [
        ("dpo", "{name: zero, zero_stage: 3}", ()),
        ("kto", "{name: pipeline, pp: 2}", ()),
        ("ipo", "{name: zero, zero_stage: 2}", ()),
        ("dpo", "{name: tensor_parallel, tp: 2}", ("model.lora={rank: 4, alpha: 8}",)),
    ],
)
def test_a_live_reference_has_the_losses_of_a_cached_one(
    pairs: list[str], train: Trainer, objective: str, strategy: str, more: tuple[str, ...]
) -> None:
    """In another layout, too; and a resumed run compares with the first weights, not with those of the checkpoint."""
    given = [*pairs, f"train.objective={objective}", "train.schedule=constant", "train.warmup=0", *more]
    cached = train(*given, "strategy.name=data_parallel", nproc=1)
    live = [*given, "train.reference=live", f"strategy={strategy}"]
    half = train(*live, "train.steps=2", "checkpoint.every=2")
    found = train(*live, "checkpoint.every=2", into=half.run.path)
    assert found.losses == pytest.approx(cached.losses, rel=2e-5)
    assert found.norms == pytest.approx(cached.norms, rel=1e-4)
    assert len(set(cached.losses)) == len(cached.losses) == 4, "the model moves away from the reference"


def dying(batch: int, seconds: float, argv: tuple[str, ...], env: dict[str, str]) -> None:
    """Enter the worker; rank 0, which writes after every batch, is killed some time after a batch has begun."""
    from toolkit.runtime import reference

    count, original = [0], reference.ReferencePass._batch

    def counted(self: Any, *given: Any) -> Any:
        if count[0] == batch:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        count[0] += 1
        return original(self, *given)

    if env["RANK"] == "0":
        reference.ReferencePass._batch = counted  # type: ignore[method-assign]
        reference.SAVE_SECONDS = 0.0
    enter_worker(argv, env)


@pytest.mark.slow
def test_a_pass_that_is_killed_ends_with_the_same_bytes(
    pairs: list[str], recipe_mapping: dict[str, Any], train: Trainer, tmp_path: Path
) -> None:
    random, moments = np.random.default_rng(1), int(os.environ.get("KILLED_PASSES", "2"))
    recipe = make_recipe(recipe_mapping, pairs)
    rows = len(load_data(recipe, input_spec_of(recipe.model)).train)
    batches = -(-rows // recipe.train.global_batch)
    train(*pairs, "train.steps=1")
    (path,) = tmp_path.glob("reference-*.safetensors")
    whole = path.read_bytes()
    unfinished = 0
    for _ in range(moments):
        path.unlink()
        moment = partial(dying, int(random.integers(1, batches)), float(random.random()) * 0.05)
        assert any(train(*pairs, "train.steps=1", enter=moment, check=False).codes)
        unfinished += path.exists() and bool(np.isnan(cached(tmp_path)).any())
        train(*pairs, "train.steps=1")
        assert path.read_bytes() == whole
    assert unfinished, "at least one pass was resumed in its middle"


@pytest.mark.parametrize("damage", ["cut", "flipped", "positive"])
def test_a_damaged_file_is_computed_again(damage: str, tmp_path: Path) -> None:
    path, said = tmp_path / "reference.safetensors", list[str]()
    file = ReferenceFile(path, said.append)
    file.write(np.array([-1.0, 2.0 if damage == "positive" else -2.0]))
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[:-3]
    elif damage == "flipped":
        data[-1] ^= 1
    path.write_bytes(data)
    assert np.isnan(file.read(2)).all()
    assert "computed again" in said[0]


def test_rows_hold_complete_pairs_that_do_not_see_each_other(pairs: list[str], recipe_mapping: dict[str, Any]) -> None:
    recipe = make_recipe(recipe_mapping, [*pairs, "data.seq_len=512"])
    samples = load_data(recipe, input_spec_of(recipe.model)).train
    assert isinstance(samples, PairRows)
    batch = samples.batch(np.arange(len(samples))).located()
    assert batch.pairs is not None
    assert batch.documents is not None
    assert batch.documents.branches is not None, "both answers continue one prompt"
    complete = batch.documents.branches.documents.lengths
    assert int(batch.pairs.sum()) * 2 == len(complete) == samples.num_documents
    assert int(batch.pairs.max()) > 1, "rows are packed"
    assert batch.weighed == int(batch.pairs.sum())
    assert samples.positions_used / samples.positions > 0.75
