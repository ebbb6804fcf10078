"""Samples and shares: exact, and the same whatever the strategy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from toolkit.errors import BadInput
from toolkit.recipe.data_files import data_files
from toolkit.recipe.sections import Data
from toolkit.runtime.corpus.sources import read_rows
from toolkit.runtime.corpus.token_documents import Documents, from_lists
from toolkit.runtime.corpus.tokenizer import Bytes, load_tokenizer
from toolkit.runtime.data.dataset import Mixture
from toolkit.runtime.data.packing import cut
from toolkit.runtime.data.sample_order import PAST_END, SampleOrder
from toolkit.runtime.data.samples import Labelled, Padded, Stream, Synthetic, micro_batches
from toolkit.runtime.models.micro_batch import IGNORE


def padded(documents: list[np.ndarray], seq_len: int) -> Padded:
    flat = from_lists(documents)
    pieces = cut(flat, np.arange(len(flat)), seq_len, "truncate")
    return Padded(flat, pieces.starts, pieces.lengths, seq_len, pad=1)


def test_a_stream_predicts_every_token_once() -> None:
    samples = Stream(np.arange(11, dtype=np.int32), seq_len=5)
    assert len(samples) == 2
    batch = samples.batch(np.array([0, 1]))
    assert batch.inputs()["input_ids"].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert batch.labels.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert batch.counted == 10


def test_padding_does_not_count() -> None:
    batch = padded([np.array([7, 8, 9]), np.arange(10)], seq_len=4).batch(np.array([0, 1]))
    assert batch.inputs()["input_ids"].tolist() == [[7, 8, 1, 1], [0, 1, 2, 3]]
    assert batch.labels.tolist() == [[8, 9, IGNORE, IGNORE], [1, 2, 3, 4]]
    assert batch.inputs()["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.counted == 6


def test_padded_batches_are_as_wide_as_the_longest_of_the_global_batch() -> None:
    samples = padded([np.arange(n) for n in (3, 60, 100, 500)], seq_len=256)
    ids = np.array([0, 1, 2, 0])
    shapes = {m.shape for r in (0, 1) for m in micro_batches(samples, ids, replica=r, replicas=2, micro_batch=1)}
    assert shapes == {torch.Size([1, 128])}
    assert samples.width(np.array([0, 3])) == 256


def test_pairs_and_classes() -> None:
    sources, targets = from_lists([np.array([5, 6, 7]), np.array([8])]), from_lists([np.array([9]), np.array([3, 4])])
    pairs = Labelled(Documents(sources.tokens, sources.bounds, targets=targets), seq_len=3, pad=0, start=2)
    batch = pairs.batch(np.array([0, 1]))
    assert batch.labels.tolist() == [[9, IGNORE, IGNORE], [3, 4, IGNORE]]
    assert batch.inputs()["decoder_input_ids"].tolist() == [[2, 9, 0], [2, 3, 4]]
    assert batch.inputs()["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    classes = Labelled(Documents(sources.tokens, sources.bounds, labels=np.array([1, 0])), seq_len=3, pad=0)
    assert classes.batch(np.array([1, 0])).labels.tolist() == [0, 1]
    assert "use_cache" not in classes.batch(np.array([0])).inputs()


def test_mixtures_put_rows_back_in_their_places() -> None:
    parts = [Synthetic(vocab=50, seq_len=4, count=3), Synthetic(vocab=9, seq_len=4, count=5)]
    batch = Mixture(parts, (1.0, 1.0)).batch(np.array([4, 0, 7, 2]))
    expected = [parts[1].batch(np.array([1])), parts[0].batch(np.array([0])), parts[1].batch(np.array([4]))]
    for row, one in enumerate(expected):
        assert torch.equal(batch.labels[row], one.labels[0])


@pytest.mark.parametrize(("replicas", "micro_batch"), [(1, 8), (2, 2), (4, 1), (8, 1)])
def test_shares_are_disjoint_and_make_the_global_batch(replicas: int, micro_batch: int) -> None:
    samples = Synthetic(vocab=100, seq_len=4)
    ids = SampleOrder(samples=len(samples), global_batch=8, seed=0).step(5)
    sizes = {"replicas": replicas, "micro_batch": micro_batch}
    batches = [micro_batches(samples, ids, replica=replica, **sizes) for replica in range(replicas)]
    shares = [torch.cat([micro.inputs()["input_ids"] for micro in share]) for share in batches]
    assert torch.equal(torch.cat(shares), samples.batch(ids).inputs()["input_ids"])
    assert {len(share) for share in shares} == {8 // replicas}


def test_what_is_past_the_end_does_not_count() -> None:
    samples = Synthetic(vocab=100, seq_len=4)
    ids = np.array([3, 9, PAST_END, PAST_END])
    found = [list(micro_batches(samples, ids, replica=r, replicas=2, micro_batch=1)) for r in (0, 1)]
    assert [[micro.counted for micro in share] for share in found] == [[4, 4], [0, 0]]


def test_bytes_round_trip() -> None:
    tokenizer = Bytes()
    (ids,) = tokenizer.encode(["Grüße 🙂"])
    assert tokenizer.decode(ids.tolist()) == "Grüße 🙂"


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", "txt", "arrow"])
def test_every_file_format(suffix: str, tmp_path: Path) -> None:
    import datasets

    texts = ["first document", "second one"]
    path = tmp_path / f"data.{suffix}"
    table = datasets.Dataset.from_dict({"text": texts})
    if suffix == "jsonl":
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    elif suffix == "csv":
        table.to_csv(str(path))
    elif suffix == "parquet":
        table.to_parquet(str(path))
    elif suffix == "arrow":
        table.save_to_disk(str(tmp_path / "saved"))
        path = next((tmp_path / "saved").glob("*.arrow"))
    else:
        path.write_text("first document")
        texts = ["first document"]
    assert texts_of(path, tmp_path) == texts


def test_directories_and_globs_are_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "ignored.bin"):
        (tmp_path / name).write_text(name)
    assert texts_of(tmp_path, tmp_path) == ["a.txt", "b.txt"]
    assert texts_of(tmp_path / "b*", tmp_path) == ["b.txt"]


def test_tables_and_texts_of_one_directory_are_joined(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "row", "more": 1}\n')
    (tmp_path / "b.txt").write_text("file")
    assert texts_of(tmp_path, tmp_path) == ["row", "file"]


def texts_of(path: Path, work: Path) -> list[str]:
    return list(read_rows(Data(path=str(path)), str(path), work / "work")["text"])


def test_the_standard_library_is_there() -> None:
    files = data_files("python-stdlib")
    assert files is not None
    assert len(files) > 200
    assert any(path.name == "dataclasses.py" for path in files)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone/data.txt", None, "no such file"),
        ("data.bin", "x", "no data file"),
        ("data.txt", "", "empty"),
        ("no*.txt", None, "no data file"),
    ],
)
def test_paths_without_data(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(BadInput, match=words):
        data_files(str(tmp_path / name))


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="can't be loaded"):
        load_tokenizer(str(tmp_path), None)
