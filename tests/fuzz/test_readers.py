"""Random and damaged files: every reader refuses them with a message or reads them, and never crashes or hangs."""

from __future__ import annotations

import copy
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.readers import PLAN, READERS, Reader
from toolkit.errors import ToolkitError

HOSTILE = [
    None, True, "", "\ud800", "\x1b[2J", "[/b]", "a" * 1000, -1, 0, 10**9, 10**30, 10**400, 1.5, float("inf"),
    float("nan"), [], [[]], {}, [0, 1, 2, 10**9], [None], {"": {}}, {"a": [1]}, "../../etc/passwd", "\0",
]  # fmt: skip
BYTES = [b"\xff", b"\0", b"\n", b"[" * 5000, b"{", b'"', b":", b"&a [*a]", b"NaN", b"-", b"9" * 400, b"!!python/x"]

Edit = tuple[float, int, bytes]
"""Where (0 to 1), how many bytes are removed, and what is inserted."""
edits = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 20), st.sampled_from(BYTES) | st.binary(max_size=4)), max_size=4
)
values = st.sampled_from(HOSTILE) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
replacements = st.lists(st.tuples(st.lists(st.integers(0, 20), min_size=1, max_size=6), values), min_size=1, max_size=3)


def edited(data: bytes, changes: list[Edit]) -> bytes:
    for place, removed, inserted in changes:
        start = round(place * len(data))
        data = data[:start] + inserted + data[start + removed :]
    return data


def replaced(data: bytes, changes: list[tuple[list[int], Any]]) -> bytes:
    """A JSON document with values at some paths replaced; other documents are replaced by the value."""
    try:
        document = json.loads(data)
    except ValueError:
        return json.dumps(changes[0][1]).encode()
    for picks, value in changes:
        node: Any = document
        for pick in picks[:-1]:
            keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
            inner = [key for key in keys if isinstance(node[key], dict | list) and node[key]]
            if not inner:
                break
            node = node[inner[pick % len(inner)]]
        keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        if keys:
            # A copy: a value that is put in twice would be changed, or contain itself, at the second place.
            node[keys[picks[-1] % len(keys)]] = copy.deepcopy(value)
    return json.dumps(document).encode() + b"\n"


def check(reader: Reader, data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        try:
            reader.read(data, Path(directory))
        except ToolkitError as error:
            assert len(str(error)) > 10  # noqa: PT017 - both outcomes are right


@pytest.mark.parametrize("name", READERS)
def test_the_valid_file_is_read(name: str, tmp_path: Path) -> None:
    """Else the others would test nothing but the first check."""
    if name == "lock":  # a valid lock of another host is refused
        with pytest.raises(ToolkitError, match="is in use by the run of process 1 on elsewhere"):
            READERS[name].read(READERS[name].valid, tmp_path)
        return
    READERS[name].read(READERS[name].valid, tmp_path)


@pytest.mark.parametrize("name", READERS)
@given(data=st.binary(max_size=200))
def test_random_bytes(name: str, data: bytes) -> None:
    check(READERS[name], data)


@pytest.mark.parametrize("name", READERS)
@given(changes=edits)
def test_edited_bytes(name: str, changes: list[Edit]) -> None:
    check(READERS[name], edited(READERS[name].valid, changes))


@pytest.mark.parametrize("name", READERS)
@given(changes=replacements)
def test_replaced_values(name: str, changes: list[tuple[list[int], Any]]) -> None:
    check(READERS[name], replaced(READERS[name].valid, changes))


FOUND = [
    ("heartbeat", b'{"rank": [], "step": 1, "time": 1.0, "pid": 1, "host": "a"}'),
    ("heartbeat", b"[]"),
    ("tokenizer", b'{"version": null}'),
    ("tokenizer", READERS["tokenizer"].valid.replace(b'"text"', b'"next"').replace(b"[UNK]", b"[U]", 1)),
    ("recipe", b"[" * 5000),
    ("recipe of a report", b"a: 2020-99-99"),
    ("cluster", b"[" * 5000),
    ("proofs", b"\xff"),
    ("proofs", b"[" * 100_000),
    ("metrics", b"[" * 100_000 + b"\n"),
    ("metrics", b'{"step": 1, "loss": 1' + b"0" * 400 + b"}\n"),
    ("events", b'{"step": {}, "text": "\\ud800"}\n'),
    ("plan of a report", b'{"time": [], "memory": 3, "dp": "two"}'),
    ("rows", b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    ("documents", b"\xff"),
    ("state", b'{"step": 3, "samples": Infinity}'),
    ("shapes", b'{"layers": [100, 120]}'),
    ("shapes", b'{"layers": ["a"], "experts": [null], "outside": 1, "head": 0, "tied": false, "text": {}}'),
    ("shapes", b'{"layers": [1], "experts": [0], "outside": 1, "head": 0, "tied": false, "text": []}'),
    ("shapes", b"[" * 100_000),
    ("verdicts", b'{"head:llama:0": {"ok": false, "reason": "\\ud800"}}'),
    ("heartbeat", b'{"rank": 0, "step": 1, "time": "a", "pid": 1, "host": "a", "error": 3, "exit_code": 1}'),
    ("latest", b"[" * 100_000),
    ("plan of a run", json.dumps({**PLAN, "dp": "two"}).encode()),
    ("plan of a run", json.dumps({**PLAN, "strategy": "\ud800"}).encode()),
]
"""Cases that once crashed or hung a reader."""


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_found_cases(name: str, data: bytes) -> None:
    started = time.perf_counter()
    check(READERS[name], data)
    assert time.perf_counter() - started < 5
