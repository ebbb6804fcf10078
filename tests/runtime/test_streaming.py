"""Streams: the same sequences on every rank and after every stop, from sources that are never read whole."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Trainer
from toolkit.parity import largest_difference
from toolkit.recipe_file import make_recipe
from toolkit.runtime import streaming
from toolkit.runtime.load import load_data
from toolkit.runtime.loaded import Loaded
from toolkit.runtime.takes import Takes

MAPPING = {
    "model": {"config": {"model_type": "llama"}},
    "data": {"tokenizer": "bytes", "seq_len": 32, "streaming": True},
    "train": {"steps": 1, "global_batch": 4},
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number} " * (1 + number % 6)}) + "\n" for number in range(300)))
    return path


def load(path: Path | str, *overrides: str) -> Loaded:
    return load_data(make_recipe(MAPPING, [f"data.path={path}", *overrides]), Takes(vocab=300))


def sequences(loaded: Loaded, low: int, high: int) -> list[list[int]]:
    return [loaded.train.batch(np.array([n])).inputs()["input_ids"][0].tolist() for n in range(low, high)]


def test_a_stream_can_be_entered_anywhere(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "WINDOW_SEQUENCES", 8)
    whole = sequences(load(source), 0, 300)
    assert sequences(load(source), 233, 300) == whole[233:], "a resumed run finds the same sequences"
    assert sequences(load(source, "train.seed=1"), 0, 50) != whole[:50]


def test_every_document_comes_once_an_epoch(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "WINDOW_SEQUENCES", 8)
    loaded = load(source)
    texts: list[str] = []
    assert loaded.tokenizer is not None
    for number in itertools.count():
        batch = loaded.train.batch(np.array([number]))
        positions = batch.inputs()["position_ids"][0].tolist()
        starts = [place for place, position in enumerate(positions) if position == 0]
        ids = batch.inputs()["input_ids"][0].tolist()
        texts += [loaded.tokenizer.decode(ids[a:b]) for a, b in itertools.pairwise([*starts, len(ids)])]
        firsts = [int(text.split()[0]) for text in texts if text.split()]
        if len(firsts) >= 300:
            break
    assert sorted(firsts) == list(range(300)), "an epoch ends with a sequence"


def test_memory_does_not_grow_with_the_stream(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "WINDOW_SEQUENCES", 8)
    loaded = load(source)
    sequences(loaded, 0, 300)
    assert isinstance(loaded.train, streaming.Streamed)
    assert len(loaded.train._held) < 6


def test_streams_train_alike_under_other_strategies(train: Trainer) -> None:
    given = ("data.streaming=true",)
    one = train(*given, "strategy.name=data_parallel", nproc=1)
    other = train(*given, "strategy={name: zero, zero_stage: 3, micro_batch: 2}")
    assert largest_difference(one.losses, other.losses) <= 1e-5
    assert largest_difference(one.norms, other.norms) <= 1e-4


def test_mixtures_stream_by_weight(tmp_path: Path) -> None:
    for name in ("a", "b"):
        rows = "".join(json.dumps({"text": name * 31}) + "\n" for _ in range(400))
        (tmp_path / f"{name}.jsonl").write_text(rows)
    loaded = load(f"{{{tmp_path}/a.jsonl: 3, {tmp_path}/b.jsonl: 1}}")
    found = [row[0] for row in sequences(loaded, 0, 200)]
    assert 0.65 < found.count(ord("a")) / 200 < 0.85
