"""Rows and files that are not what they claim to be: one message with file and line, no crash of the process."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from toolkit.errors import BadInput
from toolkit.recipe.sections import Data
from toolkit.runtime.corpus.grouped_formats import make_format
from toolkit.runtime.corpus.token_cache import TokenCache, find_or_make
from toolkit.runtime.corpus.tokenizer import Bytes
from toolkit.runtime.data.streaming import windows
from toolkit.runtime.distributed.rank_zero_first import SingleProcess

GOOD = b'{"text": "good"}\n'
BROKEN = {
    "not UTF-8": (b'{"text": "\xff\xfe"}\n', "line 3: not UTF-8"),
    "nested brackets": (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "line 3: nested too deeply"),
    "nested braces": (b'{"text": ' * 100_000 + b"1" + b"}" * 100_000 + b"\n", "line 3: nested too deeply"),
    "cut short": (b'{"text": "half\n', "line 3 can't be read as JSON"),
    "a list": (b"[1]\n", "line 3: one JSON object per line"),
    "a number": (b"17\n", "line 3: one JSON object per line"),
    "zeros": (bytes(100) + b"\n", "line 3 can't be read as JSON"),
}


def encode(path: Path, cache: Path) -> None:
    find_or_make(TokenCache(cache, workers=1), Data(), str(path), Bytes(), SingleProcess())


def stream(path: Path, _: Path) -> None:
    next(windows(Data(), {str(path): 1.0}, make_format(Data(), Bytes()), seed=0))


@pytest.mark.parametrize("read", [encode, stream])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_line_is_named(tmp_path: Path, what: str, suffix: str, read: object) -> None:
    line, words = BROKEN[what]
    path = tmp_path / f"data{suffix}"
    path.write_bytes(GOOD * 2 + line + GOOD)
    with pytest.raises(BadInput, match=words) as caught:
        read(path, tmp_path / "cache")  # type: ignore[operator]
    assert str(path) in str(caught.value)


def test_a_broken_line_in_the_second_streamed_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "b.jsonl").write_bytes(GOOD + BROKEN["nested brackets"][0])
    found = windows(Data(), {str(tmp_path): 1.0}, make_format(Data(), Bytes()), seed=0)
    with pytest.raises(BadInput, match=r"b\.jsonl, line 2: nested too deeply"):
        list(itertools.islice(found, 3))


@pytest.mark.parametrize("read", [encode, stream])
def test_text_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path, read: object) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(b"one\ntwo\nthr\xffee\n")
    with pytest.raises(BadInput, match=r"data\.txt, line 3: not UTF-8"):
        read(path, tmp_path / "cache")  # type: ignore[operator]


@pytest.mark.parametrize(
    ("format_", "row", "words"),
    [
        ("text", '{"text": 17}', r"text is 17 \(int\); text is required"),
        ("instruction", '{"prompt": "a", "response": 1.5}', r"response is 1.5 \(float\)"),
        ("seq2seq", '{"prompt": true, "response": "b"}', r"prompt is True \(bool\)"),
        ("classification", '{"text": 3, "label": 0}', r"text is 3 \(int\)"),
    ],
)
def test_numbers_are_not_text(tmp_path: Path, format_: str, row: str, words: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f"{row}\n" * 3)
    with pytest.raises(BadInput, match=words) as caught:
        find_or_make(
            TokenCache(tmp_path / "cache", workers=1), Data(format=format_), str(path), Bytes(), SingleProcess()
        )
    assert "row 1" in str(caught.value)
    assert str(path) in str(caught.value)
