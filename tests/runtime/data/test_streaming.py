"""Streams: the same sequences on every rank and after every stop, from sources that are never read whole."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import toolkit.runtime.data.load
from benchmarks.harness.recorded_order import stopping_at
from tests.conftest import Trainer
from toolkit.errors import BadInput
from toolkit.recipe.file import make_recipe
from toolkit.runtime.corpus.formats import Format
from toolkit.runtime.corpus.grouped_formats import make_format
from toolkit.runtime.data import streaming
from toolkit.runtime.data.dataset import Dataset
from toolkit.runtime.data.input_spec import InputSpec
from toolkit.runtime.data.load import load_data
from toolkit.sessions.parity import largest_difference

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


def load(path: Path | str, *overrides: str) -> Dataset:
    return load_data(make_recipe(MAPPING, [f"data.path={path}", *overrides]), InputSpec(vocab=300))


def sequences(loaded: Dataset, low: int, high: int) -> list[list[int]]:
    return [loaded.train.batch(np.array([n])).inputs()["input_ids"][0].tolist() for n in range(low, high)]


class Counting:
    """A format that counts what it tokenises."""

    def __init__(self, inner: Format) -> None:
        self.inner, self.columns, self.rows = inner, inner.columns, 0

    def encode(self, rows: Any) -> Any:
        self.rows += len(rows["text"])
        return self.inner.encode(rows)


@pytest.mark.parametrize("several", [False, True])
def test_a_stream_goes_on_anywhere_and_reads_a_block_again_at_most(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """From a mark as a checkpoint holds it: the very next sequences, in the third turn of some files, of a mixture."""
    monkeypatch.setattr(streaming, "WINDOW_SEQUENCES", 8)
    monkeypatch.setattr(streaming, "BLOCK_ROWS", 40)
    made: list[Counting] = []

    def counted(*args: Any) -> Counting:
        made.append(Counting(make_format(*args)))
        return made[-1]

    monkeypatch.setattr(toolkit.runtime.data.load, "make_format", counted)
    for number in range(4):
        rows = (json.dumps({"text": f"file {number}, row {row}"}) + "\n" for row in range(30 + number))
        (tmp_path / f"part-{number}.jsonl").write_text("".join(rows))
    parts = f"{tmp_path}/part-*.jsonl"
    path = f"{{{parts}: 1, {source}: 2}}" if several else parts
    first = load(path)
    assert isinstance(first.train, streaming.Streamed)
    whole, marks = [], {}
    for low, position in ((0, 77), (77, 198), (198, 200)):
        whole += sequences(first, low, position)
        marks[position] = json.loads(json.dumps(first.train.mark(position)))
    assert marks[77]["block"] > 0
    for position in (77, 198):
        again = load(path)
        assert isinstance(again.train, streaming.Streamed)
        before = made[-1].rows
        again.train.resume_at(marks[position])
        assert sequences(again, position, 200) == whole[position:]
    assert made[-1].rows - before <= 2 * 40, "what came before was tokenised again"
    assert sequences(load(path, "train.seed=1"), 0, 50) != whole[:50]


def test_a_stream_goes_on_with_its_own_mark_only(source: Path) -> None:
    mark = load(source).train.mark(0)  # type: ignore[attr-defined]
    for overrides, what in [(("data.seq_len=16",), "data.seq_len: 16 given; the checkpoint's stream has 32")]:
        with pytest.raises(BadInput, match=what):
            load(source, *overrides).train.resume_at(mark)  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match="has no position in a stream"):
        load(source).train.resume_at(None)  # type: ignore[attr-defined]


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


@pytest.mark.slow
def test_streams_train_alike_under_other_strategies_and_after_a_stop(train: Trainer, tmp_path: Path) -> None:
    given = ("data.streaming=true", "train.steps=6")
    one = train(*given, "strategy.name=data_parallel", nproc=1)
    zero = "strategy={name: zero, zero_stage: 3, micro_batch: 2}"
    train(*given, "strategy.name=data_parallel", nproc=1, into=tmp_path / "run", enter=stopping_at(3), check=False)
    other = train(*given, zero, into=tmp_path / "run")
    assert largest_difference(one.losses, other.losses) <= 1e-5
    assert largest_difference(one.norms, other.norms) <= 1e-4
    log = other.run.log(0).read_text()
    assert "the stream continues at sequence 0: row 1 of file 1" in log


def test_mixtures_stream_by_weight(tmp_path: Path) -> None:
    for name in ("a", "b"):
        rows = "".join(json.dumps({"text": name * 31}) + "\n" for _ in range(400))
        (tmp_path / f"{name}.jsonl").write_text(rows)
    loaded = load(f"{{{tmp_path}/a.jsonl: 3, {tmp_path}/b.jsonl: 1}}")
    found = [row[0] for row in sequences(loaded, 0, 200)]
    assert 0.65 < found.count(ord("a")) / 200 < 0.85
