"""Every reader of files: a valid file, and a function that reads its bytes. Imported by the tests beside it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import yaml
from rich.console import Console

from benchmarks.harness.tiny_llama import TINY_LLAMA
from toolkit.checkpoints import store
from toolkit.checkpoints.element_runs import StridedRange
from toolkit.checkpoints.format import (
    FileEntry,
    FragmentEntry,
    Parameter,
    canonical_json,
    dump_index,
    dump_manifest,
    parse_index,
    parse_manifest,
    parse_state,
)
from toolkit.clusters import reader as cluster_reader
from toolkit.cost.validation import validate
from toolkit.errors import BadInput
from toolkit.launching.hostfile import read_hostfile
from toolkit.models import meta_spec
from toolkit.models.spec import load_model_config, read_model_config
from toolkit.plans.split_verdicts import Axes, Proofs
from toolkit.recipe.file import load_recipe
from toolkit.recipe.model_section import Model
from toolkit.recipe.sections import Data
from toolkit.reports import run_page
from toolkit.reports.reader import read_run
from toolkit.reports.template import fill
from toolkit.reports.terminal import show
from toolkit.run_dir import heartbeat, layout, lock
from toolkit.runtime.corpus import sources
from toolkit.runtime.corpus.grouped_formats import make_format
from toolkit.runtime.corpus.token_documents import Documents, from_lists
from toolkit.runtime.corpus.tokenizer import Bytes, load_tokenizer
from toolkit.runtime.sinks.local_files import keep_until
from toolkit.runtime.supervision.supervise import OwnWorkers, Watch, first_to_fail, hang_message
from toolkit.secrets import redact
from toolkit.verdicts import VerdictFile

STATS = {"min": 0.1, "mean": 0.2, "max": 0.3, "min_rank": 0, "max_rank": 1}
RECORD = {
    "step": 1, "loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "tokens": 64, "step_seconds": 0.1, "tokens_per_second": 640.0,
    "mfu": 0.1, "memory_bytes": 1000, "comm_seconds": 0.0, "parts": {"forward": 0.05}, "ranks": {"busy_seconds": STATS},
    "straggler": {"rank": 1, "seconds": 0.1},
    "collectives": {"all_reduce": {"calls": 1, "bytes": 4, "seconds": 0.1}},
}  # fmt: skip
PLAN = {
    "strategy": "zero", "dp": 2, "tp": 1, "pp": 1, "sp": 1, "ep": 1, "zero_stage": 2, "micro_batch": 1, "grad_accum": 2,
    "time": {"compute": 0.1, "total": 0.1}, "memory": {"params": 10, "total": 10}, "memory_limit_bytes": 100,
    "pipeline_bounds": [], "model_flops": 1e9, "peak_flops": 1e12, "hardware_flops": 1e9, "link_bytes_per_second": 1e9,
}  # fmt: skip
SUMMARY = {
    "status": "done",
    "memory_bytes_by_rank": [1, 2],
    "memory_parts": {"weights": {"predicted": 1, "measured": 2}},
    "explanation": "as predicted",
}
STATE = {"step": 3, "samples": 8, "data": {"samples": 8}, "optimizer": "adamw", "counters": {"optimizer_steps": 3}}
RECIPE = {
    "name": "tiny",
    "model": {"config": dict(TINY_LLAMA)},
    "data": {"path": "synthetic", "tokenizer": "bytes", "seq_len": 32},
    "train": {"global_batch": 8, "steps": 4},
}
COUNTS = {
    "layers": [100, 120], "experts": [0, 20], "outside": 50, "head": 20, "tied": False,
    "text": {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128, "num_experts": 4, "hidden_act": "silu"},
}  # fmt: skip
VERDICT_KEY = "head:llama:0"
FILES = {"a": FileEntry(400, "0" * 64)}
CSV = Path(__file__).parents[2] / "benchmarks" / "data" / "published.csv"


@dataclass(frozen=True)
class Reader:
    """A file that the toolkit reads."""

    valid: bytes
    read: Callable[[bytes, Path], object]
    """Given the bytes of a file and an empty directory; raises nothing but `ToolkitError`."""


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _index() -> bytes:
    runs = (StridedRange(0, 1, 2, 50), StridedRange(1, 1, 2, 50))
    piece = FragmentEntry(file="a", key="0:w", kinds=("weight",), region=runs)
    return dump_index({"w": Parameter(shape=(10, 10), pieces=(piece,))})


def _file(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    def write_and_read(data: bytes, directory: Path) -> object:
        (directory / name).write_bytes(data)
        return read(directory / name)

    return write_and_read


def _report(changed: str) -> Callable[[bytes, Path], object]:
    def read(data: bytes, directory: Path) -> None:
        files = {
            "metrics.jsonl": _json(RECORD) + b"\n", "events.jsonl": _json({"step": 1, "text": "start"}) + b"\n",
            "plan.json": _json(PLAN), "summary.json": _json(SUMMARY), "recipe.yaml": _json(RECIPE),
        }  # fmt: skip
        for name, content in {**files, changed: data}.items():
            (directory / name).write_bytes(content)
        run = read_run(directory)
        show([run], Console(file=io.StringIO()))
        show([run, run], Console(file=io.StringIO()))
        fill("report.html", redact(run_page._run(run))).encode("utf-8")  # the page without plotly's 4 MB

    return read


def _cache(changed: str) -> Reader:
    def read(data: bytes, directory: Path) -> None:
        from_lists([np.arange(9)], labels=np.zeros(1, np.int64)).save(directory)
        (directory / changed).write_bytes(data)
        if Documents.problem(directory, 258) is None:
            Documents.open(directory).document(0)

    def valid(directory: Path) -> bytes:
        from_lists([np.arange(9)], labels=np.zeros(1, np.int64)).save(directory)
        return (directory / changed).read_bytes()

    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        return Reader(valid(Path(directory)), read)


def _rows(path: Path) -> None:
    sources.check_json(path)
    found = [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    for kind, columns in {"text": ["text"], "chat": ["messages"], "instruction": ["prompt", "response"]}.items():
        make_format(Data(format=kind), Bytes()).encode({name: [row.get(name) for row in found] for name in columns})


def _beats(data: bytes, directory: Path) -> None:
    path = heartbeat.path_of(directory, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    beats = heartbeat.read_all(directory)
    first_to_fail({0: 1}, beats)
    Watch(1.0).look(beats, 0.0)
    OwnWorkers(layout.RunDir(directory.parent)).pids()
    hang_message(beats, [], {}, layout.RunDir(directory), 1.0).encode("utf-8", "replace")


def _plan(path: Path) -> None:
    run = layout.RunDir(path.parent)
    run.recipe.write_bytes(_json(RECIPE))
    run.deepspeed.write_text("{}")
    layout.read(run).plan.describe().encode()


def _verdict(path: Path) -> None:
    found = VerdictFile(path, "tried again").get(VERDICT_KEY)
    assert found is None or found.reason.encode() is not None


def _lock(path: Path) -> None:
    """A lock is replaced, or refused with a message that can be printed."""
    with lock.hold(path.parent, lambda text: text.encode(), path.name):
        pass


def _latest(path: Path) -> None:
    str(store.latest_problem(path.parent)).encode()


def _shapes(data: bytes, directory: Path) -> None:
    """A cached count that is not one is counted again; here that ends in a message."""
    config = {"model_type": "mamba", "hidden_size": 64}
    with mock.patch.multiple(meta_spec, user_cache=lambda: directory, COUNTER="no.such.module", _run=_no_count):
        path = directory / "shapes" / f"mamba-{meta_spec._digest(config)}.json"
        path.parent.mkdir()
        path.write_bytes(data)
        spec = read_model_config(config)
    assert spec.params >= spec.active_params >= 0
    assert spec.hidden // spec.heads >= 0


def _no_count(kind: str, config: Any) -> dict[str, Any]:
    raise BadInput("model config", "the cached count is damaged")


def _tokenizer(data: bytes, directory: Path) -> None:
    (directory / "tokenizer.json").write_bytes(data)
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    load_tokenizer(str(directory), None).encode(["some text"])


def _model(path: Path) -> None:
    read_model_config(load_model_config(str(path), models_dir=path.parent))


TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"some": 0, "text": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
READERS: dict[str, Reader] = {
    "recipe": Reader(yaml.safe_dump(RECIPE).encode(), _file("recipe.yaml", load_recipe)),
    "hostfile": Reader(b"one slots=2\ntwo slots=2\n", _file("hostfile", read_hostfile)),
    "cluster": Reader(b"device: H100-SXM5-80GB\nnodes: 2\n", _file("cluster.yaml", cluster_reader.from_file)),
    "model config": Reader(_json(TINY_LLAMA), _file("config.json", _model)),
    "index": Reader(_index(), lambda data, _: parse_index(data, FILES)),
    "manifest": Reader(dump_manifest(FILES, 3), lambda data, _: parse_manifest(data)),
    "state": Reader(canonical_json(STATE), lambda data, _: parse_state(data, 3)),
    "metrics": Reader(_json(RECORD) + b"\n", _report("metrics.jsonl")),
    "events": Reader(_json({"step": 1, "text": "start", "kind": "start"}) + b"\n", _report("events.jsonl")),
    "plan of a report": Reader(_json(PLAN), _report("plan.json")),
    "summary": Reader(_json(SUMMARY), _report("summary.json")),
    "recipe of a report": Reader(yaml.safe_dump(RECIPE).encode(), _report("recipe.yaml")),
    "plan of a run": Reader(_json(PLAN), _file("plan.json", _plan)),
    "lock": Reader(_json({"host": "elsewhere", "pid": 1, "started": "1"}), _file("lock.json", _lock)),
    "latest": Reader(_json({"checkpoint": "step-00000003", "manifest_sha256": "0" * 64}), _file("latest", _latest)),
    "metrics of a resumed run": Reader(
        _json(RECORD) + b"\n", _file("metrics.jsonl", lambda path: keep_until(path, 1, lambda text: None))
    ),
    "proofs": Reader(
        _json({"llama:0": {"ok": True, "reason": ""}}),
        _file("proofs.json", lambda path: Proofs(path).get({}, Model(path="x"), Axes(2, 1, 1))),
    ),
    "verdicts": Reader(_json({VERDICT_KEY: {"ok": True, "reason": ""}}), _file("trials.json", _verdict)),
    "shapes": Reader(_json(COUNTS), _shapes),
    "heartbeat": Reader(_json({"rank": 0, "step": 1, "time": 1.0, "pid": 1, "host": "a"}), _beats),
    "token cache, meta.json": _cache("meta.json"),
    "token cache, tokens": _cache("tokens.npy"),
    "token cache, bounds": _cache("bounds.npy"),
    "published CSV": Reader(b"".join(CSV.read_bytes().splitlines(keepends=True)[:4]), _file("rows.csv", validate)),
    "rows": Reader(_json({"text": "a", "messages": MESSAGES, "prompt": "a", "response": "b"}), _file("a.jsonl", _rows)),
    "documents": Reader("some text, ünïcode\n".encode(), _file("a.txt", sources.read_document)),
    "tokenizer": Reader(_json(TOKENIZER), _tokenizer),
}
