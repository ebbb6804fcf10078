"""The cache of tokens: keyed by what matters, made once, never half."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Trainer
from toolkit.recipe.sections import Data
from toolkit.runtime.corpus import token_cache
from toolkit.runtime.corpus.token_cache import TokenCache, find_or_make
from toolkit.runtime.corpus.token_documents import Documents
from toolkit.runtime.corpus.tokenizer import Bytes
from toolkit.runtime.distributed.rank_zero_first import AllRanks, SingleProcess
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "data.txt"
    path.write_text("some text")
    return str(path)


def entries(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []


def test_the_second_time_nothing_is_tokenised(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TokenCache(tmp_path / "cache", workers=1)
    first = find_or_make(cache, Data(), source, Bytes(), SingleProcess())
    monkeypatch.setattr(TokenCache, "make", lambda *args: pytest.fail("tokenised again"))
    again = find_or_make(cache, Data(), source, Bytes(), SingleProcess())
    assert np.array_equal(first.tokens, again.tokens)
    assert Bytes().decode(again.document(0).tolist()) == "some text"


def test_the_key_follows_content_tokenizer_and_settings(tmp_path: Path, source: str) -> None:
    cache = TokenCache(tmp_path / "cache", workers=1)
    keys = [cache.key(Data(), source, Bytes())]
    assert cache.key(Data(seq_len=7, packing=False), source, Bytes()) == keys[0], "packing does not change documents"
    keys.append(cache.key(Data(text_column="body"), source, Bytes()))
    keys.append(cache.key(Data(), source, replace(Bytes(), identity="other")))
    Path(source).write_text("some texT")
    keys.append(cache.key(Data(), source, Bytes()))
    assert len(set(keys)) == 4


def test_a_crash_leaves_no_half_cache(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TokenCache(tmp_path / "cache", workers=1)

    def crash(self: Documents, directory: Path) -> None:
        directory.mkdir()
        (directory / "tokens.npy").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Documents, "save", crash)
        with pytest.raises(KeyboardInterrupt):
            find_or_make(cache, Data(), source, Bytes(), SingleProcess())
    assert entries(tmp_path / "cache") == []
    assert len(find_or_make(cache, Data(), source, Bytes(), SingleProcess())) == 1


def test_several_processes_tokenise_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "ROWS_A_PROCESS", 300)
    path = tmp_path / "data.csv"
    path.write_text("text\n" + "".join(f"number {n}\n" for n in range(1200)))
    documents = find_or_make(TokenCache(tmp_path / "cache", workers=2), Data(), str(path), Bytes(), SingleProcess())
    assert [Bytes().decode(documents.document(n).tolist()) for n in (0, 599, 1199)] == [
        "number 0",
        "number 599",
        "number 1199",
    ]


def make_as_rank(root: Path, source: str) -> tuple[int, int]:
    """Tokens found, and how often this rank tokenised."""
    from toolkit.runtime.distributed.process_group import current_world

    count = 0
    make: Callable[..., None] = TokenCache.make

    def counting(*args: object) -> None:
        nonlocal count
        count += 1
        make(*args)

    TokenCache.make = counting  # type: ignore[assignment, method-assign]
    documents = find_or_make(TokenCache(root, workers=1), Data(), source, Bytes(), AllRanks(current_world()))
    return len(documents.tokens), count


@pytest.mark.slow
def test_one_rank_writes_and_the_others_wait(tmp_path: Path, source: str) -> None:
    results = call_on_ranks(make_as_rank, tmp_path / "cache", source, nproc=3)
    assert first_failure(results) is None
    assert results == [(10, 1), (10, 0), (10, 0)]
    assert len(entries(tmp_path / "cache")) == 1


def test_a_problem_meets_every_rank_alike(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("body\nx\n")
    results = call_on_ranks(make_as_rank, tmp_path / "cache", str(path), nproc=2)
    assert ["no column 'text'" in result.reason for result in results] == [True, True]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_made_anew_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """Every file of a cache, the targets of a seq2seq data set among them."""
    cache, section = TokenCache(tmp_path / "cache", workers=1), Data(format="seq2seq")
    first = find_or_make(cache, section, "synthetic", Bytes(), SingleProcess())
    expected = first.tokens.copy(), first.targets.tokens.copy() if first.targets else None
    (path,) = (tmp_path / "cache").iterdir()
    names = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]
    assert len(names) >= 6
    for name in names:
        DAMAGES[damage](path / name)
        capsys.readouterr()
        again = find_or_make(cache, section, "synthetic", Bytes(), SingleProcess())
        assert np.array_equal(again.tokens, expected[0]), name
        assert again.targets is not None
        assert np.array_equal(again.targets.tokens, expected[1]), name
        assert "it is damaged, and is made anew" in capsys.readouterr().err, name
    assert entries(tmp_path / "cache") == [path.name]


def test_token_ids_outside_the_vocabulary_are_damage_too(tmp_path: Path, source: str) -> None:
    """Whoever writes tokens and digests alike does not get ids into the embedding that it has no row for."""
    cache = TokenCache(tmp_path / "cache", workers=1)
    found = find_or_make(cache, Data(), source, Bytes(), SingleProcess())
    path = tmp_path / "planted"
    for wrong in (-1, Bytes().vocab):
        replace(found, tokens=np.full_like(found.tokens, wrong)).save(path)
        assert "the tokenizer has 0 to 257" in str(Documents.problem(path, Bytes().vocab))
    replace(found, bounds=found.bounds + 1).save(path)
    assert "bounds" in str(Documents.problem(path, Bytes().vocab))


@pytest.mark.slow
def test_a_run_on_a_damaged_cache_has_the_undamaged_first_loss(train: Trainer, tmp_path: Path) -> None:
    section = f"data.cache={tmp_path / 'cache'}"
    first = train(section, "train.steps=1", nproc=1)
    (path,) = (tmp_path / "cache").iterdir()
    flip(path / "tokens.npy")
    again = train(section, "train.steps=1", nproc=1)
    assert again.losses == first.losses
    assert "made anew" in again.run.log(0).read_text()
