"""Samples, order and shares: exact, and the same whatever the strategy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from toolkit.data_files import data_files
from toolkit.errors import BadInput
from toolkit.recipe import Data
from toolkit.runtime.data import IGNORE, Order, Packed, Padded, Synthetic, load_samples, micro_batches
from toolkit.runtime.sources import read_documents
from toolkit.runtime.tokenizer import Bytes, load_tokenizer


def test_packing_predicts_every_token_once() -> None:
    samples = Packed(np.arange(11, dtype=np.int32), seq_len=5)
    assert len(samples) == 2
    batch = samples.batch(np.array([0, 1]))
    assert batch.input_ids.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert batch.labels.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert batch.counted == 10


def test_padding_does_not_count() -> None:
    samples = Padded([np.array([7, 8, 9]), np.arange(10)], seq_len=4, pad=1)
    batch = samples.batch(np.array([0, 1]))
    assert batch.input_ids.tolist() == [[7, 8, 9, 1], [0, 1, 2, 3]]
    assert batch.labels.tolist() == [[8, 9, IGNORE, IGNORE], [1, 2, 3, 4]]
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.counted == 6


def test_each_epoch_visits_every_sample_once_in_another_order() -> None:
    order = Order(samples=10, global_batch=4, seed=3)
    ids = np.concatenate([order.step(step) for step in range(5)])
    first, second = ids[:10], ids[10:20]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first.tolist() != second.tolist()
    assert first[:4].tolist() != Order(samples=10, global_batch=4, seed=4).step(0).tolist()


@pytest.mark.parametrize(("replicas", "micro_batch"), [(1, 8), (2, 2), (4, 1), (8, 1)])
def test_shares_are_disjoint_and_make_the_global_batch(replicas: int, micro_batch: int) -> None:
    samples = Synthetic(vocab=100, seq_len=4)
    ids = Order(samples=len(samples), global_batch=8, seed=0).step(5)
    sizes = {"replicas": replicas, "micro_batch": micro_batch}
    batches = [micro_batches(samples, ids, replica=replica, **sizes) for replica in range(replicas)]
    shares = [torch.cat([micro.input_ids for micro in share]) for share in batches]
    assert torch.equal(torch.cat(shares), samples.batch(ids).input_ids)
    assert {len(share) for share in shares} == {8 // replicas}


def test_bytes_round_trip() -> None:
    tokenizer = Bytes()
    ids = tokenizer.encode("Grüße 🙂")
    assert ids[-1] == tokenizer.end
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
    assert list(read_documents(Data(path=str(path)))) == texts


def test_directories_and_globs_are_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "ignored.bin"):
        (tmp_path / name).write_text(name)
    assert list(read_documents(Data(path=str(tmp_path)))) == ["a.txt", "b.txt"]
    assert list(read_documents(Data(path=str(tmp_path / "b*")))) == ["b.txt"]


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


def test_faults_inside_files(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"body": "x"}\n')
    with pytest.raises(BadInput, match="no column 'text'; it has body"):
        list(read_documents(Data(path=str(path))))
    path.write_text('{"text": "x"}\n{"text": broken}\n')
    with pytest.raises(BadInput, match="can't be read as json"):
        list(read_documents(Data(path=str(path))))


def test_too_little_text_and_too_large_a_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("short")
    with pytest.raises(BadInput, match="6 tokens in 1 documents; one sequence needs 33"):
        load_samples(Data(path=str(path), seq_len=32), Bytes(), vocab=300)
    with pytest.raises(BadInput, match="258 tokens; the model's embedding has 100 rows"):
        load_samples(Data(path=str(path), seq_len=4), Bytes(), vocab=100)


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="can't be loaded"):
        load_tokenizer(str(tmp_path), None)
