"""Checkpoints from a hostile or a broken disk: nothing in them runs, and a write that fails leaves the older ones."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.harness.tiny_llama import TINY_LLAMA
from toolkit import cli
from toolkit.checkpoints import element_runs, store
from toolkit.checkpoints.format import MANIFEST, FileEntry, canonical_json, dump_manifest, sha256
from toolkit.errors import BadInput, CheckpointFailed
from toolkit.recipe.file import make_recipe
from toolkit.run_dir import heartbeat, layout
from toolkit.run_dir.layout import check
from toolkit.runtime.checkpoint.fragments import Fragment
from toolkit.runtime.checkpoint.reader import Reader, load
from toolkit.runtime.checkpoint.saver import Writer, rank_files
from toolkit.sessions.resolve import resolve

pytestmark = pytest.mark.slow


def fragments() -> list[Fragment]:
    return [
        Fragment(name="w", kind=kind, shape=(6, 5), region=element_runs.flat(0, 30), tensor=torch.arange(30.0) + number)
        for number, kind in enumerate(("weight", "exp_avg"))
    ]


def save(root: Path, step: int, recipe: dict[str, Any] | None = None) -> Path:
    """A whole checkpoint of one rank."""
    state = {"step": step, "samples": 0, "optimizer": "adamw", "data": {}, "counters": {"optimizer_steps": step}}
    given = recipe or {"model": {"config": TINY_LLAMA}, "data": {"path": "synthetic"}, "train": {"steps": 1}}
    documents = {"state.json": canonical_json(state), "recipe.yaml": yaml.safe_dump(given).encode()}
    return Writer(root=root, rank=0, keep=9).write(step, rank_files(fragments(), rank=0), documents)


def forge(path: Path) -> None:
    """A manifest that fits whatever is there: the attacker can hash, too."""
    files = {p.name: FileEntry(p.stat().st_size, sha256(p)) for p in path.iterdir() if p.name != MANIFEST}
    (path / MANIFEST).write_bytes(dump_manifest(files, 1))


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "payload-has-run"
    yield path
    assert not path.exists(), "a payload was run"


NAMES = ["manifest.json", "index.json", "state.json", "recipe.yaml", "rank-00000-0.safetensors"]


@pytest.mark.parametrize("name", NAMES)
def test_a_pickle_under_any_name_is_an_error(
    name: str, marker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path / "checkpoints", 1)
    (path / name).write_bytes(pickle.dumps(Payload(marker)))
    if name != MANIFEST:
        forge(path)
    assert cli.main(["export", str(path), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert re.search(r"damaged|not|can't", message)
    if name != "recipe.yaml":  # which a reader of weights never opens
        with pytest.raises(BadInput):
            Reader.open(path).full("w", "weight")


ORDER = ["recipe.yaml", "plan.json", "deepspeed.json"]
RECORDS = ["metrics.jsonl", "summary.json", "events.jsonl", "eval.jsonl"]


@pytest.mark.parametrize("name", [*ORDER, *RECORDS, "checkpoints/latest", "checkpoints/best", "heartbeats/rank-0.json"])
def test_a_pickle_in_a_run_directory_runs_nothing(
    name: str, marker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever opens it: the worker's order, a report, `verify`, the newest checkpoint, the beats."""
    data = {"path": "synthetic", "seq_len": 32}
    given = {"model": {"config": TINY_LLAMA}, "data": data, "train": {"steps": 1}}
    run = resolve(make_recipe(given, ()), 1).write(tmp_path / "run")
    save(run.checkpoints, 1)
    (run.path / name).parent.mkdir(exist_ok=True)
    (run.path / name).write_bytes(pickle.dumps(Payload(marker)))
    if name in ORDER:
        with pytest.raises(BadInput):
            layout.read(run)
    heartbeat.read_all(run.heartbeats)
    assert store.steps(run.checkpoints) == [1]
    store.prune(run.checkpoints, 1)
    for argv in (["report", str(run.path)], ["verify", str(run.path)]):
        assert cli.main(argv) in (0, 1, 2)
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system ['touch {0}']", "!!python/name:os.system ''"])
def test_yaml_tags_run_nothing(tag: str, marker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "checkpoints", 1)
    (path / "recipe.yaml").write_text("name: x\nmodel: " + tag.format(marker) + "\n")
    forge(path)
    assert cli.main(["export", str(path), str(tmp_path / "out")]) == 2
    assert "not usable as YAML" in capsys.readouterr().err


def test_code_of_a_model_runs_only_if_the_caller_says_so(marker: Path, tmp_path: Path) -> None:
    """The recipe inside a checkpoint asks for remote code; that is not enough."""
    evil = tmp_path / "evil"
    evil.mkdir()
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (evil / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    (evil / "evil.py").write_text(f"import os\nos.system('touch {marker}')\n")
    recipe = {"model": {"path": str(evil), "trust_remote_code": True}, "train": {"steps": 1}}
    path = save(tmp_path / "checkpoints", 1, recipe)
    assert cli.main(["export", str(path), str(tmp_path / "out")]) == 2


def test_links_and_traversal_read_nothing_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "checkpoints", 1)
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes((path / "rank-00000-0.safetensors").read_bytes())
    index = json.loads((path / "index.json").read_text())
    index["parameters"]["w"]["pieces"][0]["file"] = "../../outside.safetensors"
    (path / "index.json").write_bytes(canonical_json(index))
    forge(path)
    assert cli.main(["verify", str(path)]) == 2
    assert "is not a file in the manifest" in capsys.readouterr().err
    with pytest.raises(BadInput, match="is not a file in the manifest"):
        Reader.open(path)
    (path / "rank-00000-0.safetensors").unlink()
    (path / "rank-00000-0.safetensors").symlink_to(outside)
    assert any("regular file" in problem.what for problem in check(path))


def test_a_tensor_of_another_size_than_its_index_says_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 1)
    index = json.loads((path / "index.json").read_text())
    index["parameters"]["w"]["shape"] = [6, 10]
    index["parameters"]["w"]["pieces"][0]["runs"] = [[0, 60]]
    (path / "index.json").write_bytes(canonical_json(index))
    forge(path)
    with pytest.raises(BadInput, match="another size"):
        Reader.open(path).full("w", "weight")


class Memory:
    """The smallest thing that offers fragments."""

    def __init__(self) -> None:
        self.held = fragments()
        for fragment in self.held:
            fragment.tensor.zero_()

    def fragments(self) -> Iterator[Fragment]:
        return iter(self.held)

    def prepare(self, kinds: Any, steps: int) -> None:
        """All is there."""

    def drain(self) -> None:
        """Nothing is under way."""

    def refresh(self) -> None:
        """Nothing is derived."""

    def counters(self) -> dict[str, float]:
        return {}

    def set_counters(self, counters: dict[str, float]) -> None:
        self.steps = counters["optimizer_steps"]


def test_a_write_that_fails_anywhere_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at the first system call of a save, at the second, at the third, ..."""
    root = tmp_path / "checkpoints"
    save(root, 1)
    failures = 0
    for number in range(1000):
        with monkeypatch.context() as patch:
            broken = Broken(patch, number)
            words = _failure(root)
        if not broken.failed:
            break
        failures += 1
        assert "No space left on device" in words
        assert check(store.path_of(root, 1)) == []
        newest = store.steps(root)[0]
        assert check(store.path_of(root, newest)) == [], "what is there is whole"
        memory = Memory()
        load(Reader.open(store.path_of(root, newest)), memory, rank=0)
        assert torch.equal(memory.held[0].tensor, torch.arange(30.0))
        if newest == 2:
            store.remove(root, 2)
    assert failures >= 12
    assert store.steps(root) == [2, 1]
    assert sorted(p.name for p in root.iterdir()) == ["latest", "step-00000001", "step-00000002"]


def _failure(root: Path) -> str:
    try:
        save(root, 2)
    except CheckpointFailed as error:
        return str(error)
    return ""


class Broken:
    """A disk that is full from the `number`-th call on that needs space."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int) -> None:
        self.left, self.failed = number, False
        for owner, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (Path, "mkdir"), (Path, "open")):
            patch.setattr(owner, name, self.limited(getattr(owner, name)))

    def limited(self, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                self.failed = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.left -= 1
            return original(*args, **kwargs)

        return call
