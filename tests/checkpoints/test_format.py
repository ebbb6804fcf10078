"""Manifest, index and store: nothing damaged is taken for whole, nothing leads out of the directory."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from benchmarks.harness.checkpoint_layouts import damage
from toolkit.checkpoints import store
from toolkit.checkpoints.element_runs import StridedRange, flat
from toolkit.checkpoints.format import (
    INDEX,
    MANIFEST,
    STATE,
    FileEntry,
    FragmentEntry,
    Parameter,
    canonical_json,
    dump_index,
    dump_manifest,
    file_problems,
    parse_index,
    parse_manifest,
    parse_state,
    sha256,
)
from toolkit.errors import BadInput
from toolkit.run_dir.layout import check

RUN_STATE = {
    "samples": 8,
    "data": {"samples": 8, "seed": 0},
    "optimizer": "adamw",
    "counters": {"optimizer_steps": 1, "skipped_steps": 0},
}


def make(root: Path, step: int, seed: int = 0) -> Path:
    """A small whole checkpoint."""
    writing = store.begin(root, step, 1000)
    halves = [f"rank-0000{rank}-0.safetensors" for rank in (0, 1)]
    pieces = [
        FragmentEntry(file=name, key="0:w", kinds=("weight", "exp_avg"), region=flat(rank * 50, rank * 50 + 50))
        for rank, name in enumerate(halves)
    ]
    documents = {name: random.Random(f"{step}{name}{seed}").randbytes(400) for name in halves}
    documents[INDEX] = dump_index({"w": Parameter(shape=(10, 10), pieces=tuple(pieces))})
    documents[STATE] = canonical_json({**RUN_STATE, "step": step})
    documents["recipe.yaml"] = b"name: x\n"
    files = {}
    for name, data in documents.items():
        store.write_synced(writing / name, data)
        files[name] = FileEntry(len(data), sha256(writing / name))
    return store.commit(writing, files, step)


def test_a_committed_checkpoint_is_whole(tmp_path: Path) -> None:
    path = make(tmp_path, 10)
    assert check(path) == []
    assert store.steps(tmp_path) == [10]
    assert store.latest_problem(tmp_path) is None
    assert json.loads((tmp_path / "latest").read_text())["checkpoint"] == "step-00000010"


def test_every_corruption_is_found_and_named(tmp_path: Path) -> None:
    rng = random.Random(0)
    original = make(tmp_path / "a", 10)
    for number in range(300):
        path = tmp_path / "b" / original.name
        shutil.copytree(original, path)
        kind, name = damage(path, rng)
        found = check(path)
        assert found, f"{number}: {kind} of {name} was not noticed"
        named = {problem.where for problem in found}
        assert name in named or MANIFEST in named, f"{number}: {kind} of {name} was reported as {named}"
        shutil.rmtree(tmp_path / "b")


def test_files_of_another_checkpoint_are_found(tmp_path: Path) -> None:
    first, second = make(tmp_path, 10, seed=1), make(tmp_path, 20, seed=2)
    shutil.copy(first / "rank-00000-0.safetensors", second / "rank-00000-0.safetensors")
    assert [problem.where for problem in check(second)] == ["rank-00000-0.safetensors"]
    shutil.rmtree(second)
    os.rename(first, second)
    assert "belongs to step 10, but is in the directory of step 20" in str(check(second)[0])


def test_a_stray_file_and_a_link_are_refused(tmp_path: Path) -> None:
    path = make(tmp_path, 10)
    (path / "extra.bin").write_bytes(b"?")
    assert "not in the manifest" in str(check(path)[0])
    (path / "extra.bin").unlink()
    secret = tmp_path / "secret"
    shutil.move(path / "rank-00000-0.safetensors", secret)
    (path / "rank-00000-0.safetensors").symlink_to(secret)
    assert "regular file" in str(check(path)[0])


def test_a_manifest_that_leads_out_is_refused(tmp_path: Path) -> None:
    for name in ("../secret", "/etc/passwd", "a/b", ".hidden", ""):
        with pytest.raises(BadInput, match="plain file name"):
            parse_manifest(dump_manifest({name: FileEntry(1, "0")}, 1))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.update(file="../../secret"),
        lambda p: p.update(file="/etc/passwd"),
        lambda p: p.update(runs=[[0, 10**15]]),
        lambda p: p.update(runs=[[5, 45]]),
        lambda p: p.update(runs=[[0, 1, 2, 10**9]]),
        lambda p: p.update(runs=[[0, 1, 0, 10**9]]),
        lambda p: p.update(runs=[[0, 10**9, 1, 10**9], [0, 100]]),
        lambda p: p.update(runs="all"),
        lambda p: p.update(kinds=[3]),
        lambda p: p.pop("key"),
    ],
    ids=[
        "traversal",
        "absolute",
        "beyond",
        "gap",
        "endless",
        "endless in place",
        "endless twice",
        "no list",
        "no text",
        "no key",
    ],
)
def test_an_index_that_lies_is_refused(change: object) -> None:
    piece = FragmentEntry(file="a", key="0:w", kinds=("weight",), region=flat(0, 100))
    given = json.loads(dump_index({"w": Parameter(shape=(10, 10), pieces=(piece,))}))
    change(given["parameters"]["w"]["pieces"][0])  # type: ignore[operator]
    with pytest.raises(BadInput, match=r"index\.json"):
        parse_index(json.dumps(given).encode(), {"a": FileEntry(100, "")})


def test_an_index_of_more_elements_than_its_file_has_bytes_is_refused_before_it_is_expanded() -> None:
    runs = (StridedRange(0, 1, 2, 10**9), StridedRange(1, 1, 2, 10**9))
    piece = FragmentEntry(file="a", key="0:w", kinds=("weight",), region=runs)
    data = dump_index({"w": Parameter(shape=(2 * 10**9,), pieces=(piece,))})
    with pytest.raises(BadInput, match="2000000000 elements in a, which has 100 bytes"):
        parse_index(data, {"a": FileEntry(100, "")})
    with pytest.raises(BadInput, match="2000000000 pieces"):
        parse_index(data, {"a": FileEntry(10**12, "")})


STATES = {
    "an infinite counter": lambda s: s["counters"].update(optimizer_steps=float("inf")),
    "a huge counter": lambda s: s["counters"].update(skipped_steps=10**400),
    "a counter that is NaN": lambda s: s["counters"].update(skipped_steps=float("nan")),
    "a counter as text": lambda s: s["counters"].update(skipped_steps="1"),
    "a true counter": lambda s: s["counters"].update(optimizer_steps=True),
    "a negative step": lambda s: s.update(step=-3),
    "a step of another checkpoint": lambda s: s.update(step=4),
    "half a step": lambda s: s.update(step=3.5),
    "negative samples": lambda s: s.update(samples=-1),
    "no samples": lambda s: s.pop("samples"),
    "no counters": lambda s: s.pop("counters"),
    "no optimizer steps": lambda s: s["counters"].pop("optimizer_steps"),
    "no optimizer": lambda s: s.pop("optimizer"),
    "data as a list": lambda s: s.update(data=[]),
}


@pytest.mark.parametrize("what", STATES)
def test_a_state_that_lies_is_refused(what: str) -> None:
    state = {**copy.deepcopy(RUN_STATE), "step": 3}
    assert parse_state(canonical_json(state), 3) == state
    STATES[what](state)
    with pytest.raises(BadInput, match=r"state\.json: is not the state of a run"):
        parse_state(canonical_json(state), 3)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
        store.prune(tmp_path, keep=2)
    assert store.steps(tmp_path) == [4, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000003", "step-00000004"]


def test_what_a_crash_left_is_cleared_and_never_read(tmp_path: Path) -> None:
    make(tmp_path, 1)
    writing = store.begin(tmp_path, 2, 1000)
    (writing / "rank-00000-0.safetensors").write_bytes(b"half")
    assert store.steps(tmp_path) == [1]
    make(tmp_path, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000003"]


def test_a_full_disk_is_said_before_a_byte_is_written(tmp_path: Path) -> None:
    make(tmp_path, 1)
    with pytest.raises(BadInput, match="GB are free"):
        store.begin(tmp_path, 2, 2**60)
    assert store.steps(tmp_path) == [1]
    assert file_problems(store.path_of(tmp_path, 1)) == []


def test_a_damaged_latest_is_named(tmp_path: Path) -> None:
    make(tmp_path, 1)
    latest = tmp_path / "latest"
    good = latest.read_bytes()
    for bit in range(0, len(good) * 8, 5):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        latest.write_bytes(bad)
        assert store.latest_problem(tmp_path) is not None, bit
