"""Checkpoints of real runs: resumed bit by bit, under any layout and world size; damaged ones are never loaded."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from benchmarks.harness.checkpoint_layouts import LAYOUTS, assert_equal, resume_and_copy
from benchmarks.harness.self_killing import spike_at_step_9
from tests.conftest import Finished, Trainer
from toolkit.checkpoints import store
from toolkit.runtime.checkpoint import saver as saver_module
from toolkit.runtime.checkpoint.fragments import share
from toolkit.runtime.checkpoint.reader import Reader
from toolkit.runtime.checkpoint.saver import Snapshots
from toolkit.runtime.supervision.warm_pool import enter_worker
from toolkit.sessions.parity import largest_difference

pytestmark = pytest.mark.slow

STEPS, SAVED = 14, 4
NAMES = list(LAYOUTS)
PAIRS = [(source, NAMES[(i + 1) % len(NAMES)]) for i, source in enumerate(NAMES)]
PAIRS += [(source, NAMES[(i + 5) % len(NAMES)]) for i, source in enumerate(NAMES) if i % 3 == 1]
BASE = (
    f"train.steps={STEPS}", f"checkpoint.every={SAVED}", "checkpoint.keep=9", "model.config.num_hidden_layers=4"
)  # fmt: skip


@pytest.fixture(scope="session")
def sources() -> dict[str, Finished]:
    """Uninterrupted runs, one a layout, made when first asked for."""
    return {}


@pytest.fixture
def source(sources: dict[str, Finished], train: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    def get(name: str) -> Finished:
        if name not in sources:
            nproc, axes = LAYOUTS[name]
            directory = tmp_path_factory.mktemp(name.replace("@", "-"))
            sources[name] = train(*BASE, *axes, nproc=nproc, into=directory / "run")
        return sources[name]

    return get


def saved(run: Finished, step: int = SAVED) -> Path:
    return store.path_of(run.run.checkpoints, step)


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=[f"{a}→{b}" for a, b in PAIRS])
def test_any_layout_reads_any_other(source: Any, train: Trainer, first: str, second: str) -> None:
    origin, (nproc, axes) = source(first), LAYOUTS[second]
    done = train(*BASE, *axes, f"checkpoint.resume={saved(origin)}", nproc=nproc, enter=resume_and_copy)
    assert_equal(saved(origin), store.path_of(done.run.path / "reloaded", SAVED))
    assert [record["step"] for record in done.records] == list(range(SAVED + 1, STEPS + 1))
    assert largest_difference(origin.losses[SAVED:], done.losses) <= 1e-5


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("data_parallel@1", "zero3@4", "zero2+cpu@2")])
def test_the_same_layout_goes_on_bit_by_bit(source: Any, train: Trainer, name: str) -> None:
    origin, (nproc, axes) = source(name), LAYOUTS[name]
    done = train(*BASE, *axes, f"checkpoint.resume={saved(origin)}", nproc=nproc)
    assert origin.losses[SAVED:] == done.losses
    assert origin.norms[SAVED:] == done.norms
    assert_equal(saved(origin, STEPS), saved(done, STEPS))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_bf16_goes_on_bit_by_bit_with_dropout(train: Trainer, stage: int) -> None:
    """Masters differ from the working copy, and the generators of every rank count."""
    config = "{model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 2, vocab_size: 264, n_positions: 64}"
    name = "zero" if stage else "data_parallel"
    base = (f"strategy.name={name}", f"strategy.zero_stage={stage}", "model.precision=bf16", f"model.config={config}")
    whole = train(*base, "train.steps=6", "checkpoint.every=3")
    done = train(*base, "train.steps=6", "checkpoint.every=3", f"checkpoint.resume={saved(whole, 3)}")
    assert whole.losses[3:] == done.losses
    assert_equal(saved(whole, 6), saved(done, 6))


def test_lora_saves_adapters_only_and_goes_on(train: Trainer) -> None:
    base = ("model.lora={rank: 4}", "train.steps=6", "checkpoint.every=3", "strategy.name=zero")
    whole = train(*base, "strategy.zero_stage=2")
    index = Reader.open(saved(whole, 6)).index
    assert index
    assert all("lora_" in name for name in index)
    done = train(*base, "strategy.zero_stage=3", f"checkpoint.resume={saved(whole, 3)}", nproc=1)
    assert largest_difference(whole.losses[3:], done.losses) <= 1e-5


@pytest.mark.parametrize("optimizer", ["sgd"])
def test_an_optimizer_without_moments(train: Trainer, optimizer: str) -> None:
    base = (f"train.optimizer={optimizer}", "train.steps=4", "checkpoint.every=2")
    whole = train(*base, "strategy.name=data_parallel")
    done = train(*base, "strategy.name=zero", "strategy.zero_stage=3", f"checkpoint.resume={saved(whole, 2)}")
    assert largest_difference(whole.losses[2:], done.losses) <= 1e-5


def test_no_byte_is_written_twice_and_ranks_share_the_work(source: Any) -> None:
    path = saved(source("data_parallel@2"))
    sizes = [file.stat().st_size for file in sorted(path.glob("rank-*.safetensors"))]
    numel = sum(torch.Size(p.shape).numel() for p in Reader.open(path).index.values())
    assert len(sizes) == 2
    assert max(sizes) - min(sizes) < 0.1 * max(sizes)
    assert sum(sizes) < 3 * 4 * numel + 2 * 32_000, "three fp32 states and the generators"
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:  # any safetensors reader can look at it
            assert len(opened.keys()) > 5


def test_the_whole_run_continues_in_its_directory(train: Trainer, source: Any, tmp_path: Path) -> None:
    """After a crash at step 6 or so: metrics have no step twice, and the newest checkpoint can be resumed."""
    origin = source("zero2@2")
    directory = tmp_path / "again"
    shutil.copytree(origin.run.path, directory)
    for step in (8, 12, 14):
        shutil.rmtree(store.path_of(directory / "checkpoints", step))
    metrics = directory / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:7]) + '{"step": 8, "lo')
    done = train(*BASE, *LAYOUTS["zero2@2"][1], into=directory)
    assert [record["step"] for record in done.records] == list(range(1, STEPS + 1))
    assert done.losses == origin.losses
    assert done.summary["steps"] == STEPS
    assert done.summary["tokens"] == origin.summary["tokens"]
    assert store.steps(done.run.checkpoints) == [14, 12, 8, 4]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(train: Trainer, source: Any, tmp_path: Path) -> None:
    origin = source("zero2@2")
    directory = tmp_path / "again"
    shutil.copytree(origin.run.path, directory)
    victim = store.path_of(directory / "checkpoints", 14) / "rank-00001-0.safetensors"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 4
    victim.write_bytes(data)
    done = train(*BASE, *LAYOUTS["zero2@2"][1], into=directory)
    assert done.losses == origin.losses
    log = done.run.log(0).read_text()
    assert "step-00000014: rank-00001-0.safetensors: does not have the SHA-256" in log
    assert "resuming from" in log.partition("damaged")[2]
    assert "(step 12)" in log
    assert (directory / "checkpoints" / "damaged-step-00000014-1").is_dir()
    assert_equal(saved(origin, 14), saved(done, 14))


def test_only_damaged_ones_stop_the_run(train: Trainer, source: Any, tmp_path: Path) -> None:
    directory = tmp_path / "again"
    shutil.copytree(source("zero2@2").run.path, directory)
    for step in store.steps(directory / "checkpoints"):
        (store.path_of(directory / "checkpoints", step) / "index.json").unlink()
    done = train(*BASE, *LAYOUTS["zero2@2"][1], into=directory, check=False)
    assert set(done.codes) == {2}


def test_another_model_or_optimizer_is_refused(train: Trainer, source: Any) -> None:
    path = saved(source("data_parallel@1"))
    for override, words in {
        "model.config.hidden_size=64": "has shape [264, 32] in the checkpoint, [264, 64] in the model",
        "train.optimizer=sgd": "holds the states of adamw",
        "train.seed=5": "the next sample is not defined",
    }.items():
        done = train(*BASE, override, f"checkpoint.resume={path}", nproc=1, check=False)
        assert done.codes == [2]
        assert words in done.run.log(0).read_text()


def copies_slowly(argv: tuple[str, ...], env: dict[str, str]) -> None:
    """A worker whose copy of the state takes longer than a forward and backward pass."""
    original = Snapshots.copy

    def copy(*args: Any) -> Any:
        time.sleep(0.5)
        return original(*args)

    Snapshots.copy = copy
    enter_worker(argv, env)


@pytest.mark.parametrize("name", ["data_parallel@2", "zero2@2", "zero3@2", "zero2+cpu@2", "pipeline@2"])
def test_asynchronous_saves_hold_the_next_update_until_the_copy_is_made(train: Trainer, source: Any, name: str) -> None:
    origin, (nproc, axes) = source(name), LAYOUTS[name]
    done = train(*BASE, *axes, "checkpoint.asynchronous=true", nproc=nproc, enter=copies_slowly)
    assert store.steps(done.run.checkpoints) == [14, 12, 8, 4]
    for step in (4, 8, 14):
        assert_equal(saved(origin, step), saved(done, step))
    assert min(done.summary["save_seconds"][:3]) > 0.2, "the update did not wait, or its wait is not counted"


def test_data_goes_on_at_the_next_sample_with_another_batch(source: Any, train: Trainer) -> None:
    origin = source("data_parallel@1")
    done = train(*BASE, "train.global_batch=4", "train.steps=6", f"checkpoint.resume={saved(origin)}", nproc=1)
    state = json.loads((saved(done, 6) / "state.json").read_text())
    assert state["samples"] == 4 * 8 + 2 * 4


def test_replicas_split_what_they_share() -> None:
    from toolkit.checkpoints import element_runs
    from toolkit.runtime.checkpoint.fragments import Fragment

    def held(copy: int) -> list[Fragment]:
        sizes = {"a": 10, "b": 1, "c": 7}
        return [
            Fragment(
                name=name,
                kind=kind,
                shape=(n,),
                region=element_runs.flat(0, n),
                tensor=torch.arange(n),
                copy=copy,
                copies=3,
            )
            for name, n in sizes.items()
            for kind in ("weight", "exp_avg")
        ]

    written = [share(held(copy)) for copy in range(3)]
    for name, n in {"a": 10, "b": 1, "c": 7}.items():
        for kind in ("weight", "exp_avg"):
            parts = [f.region for own in written for f in own if (f.name, f.kind) == (name, kind)]
            assert element_runs.cover(parts, n) is None
    assert max(sum(f.tensor.numel() for f in own) for own in written) <= 14


def test_a_spike_is_rewound_and_its_batches_skipped(train: Trainer) -> None:
    axes = ("strategy.name=zero", "strategy.zero_stage=2", "strategy.micro_batch=4", "train.on_spike=rewind")
    done = train(*BASE, *axes, enter=spike_at_step_9)
    assert [record["step"] for record in done.records] == list(range(1, STEPS + 1))
    assert max(done.losses) < 10
    assert "back to step 8, 8 samples are skipped" in done.run.log(0).read_text()
    state = json.loads((saved(done, STEPS) / "state.json").read_text())
    assert state["samples"] == 8 * (STEPS + 1), "the batch of the spike was used once and left behind"


class Streams:
    """Stands in for the streams of an accelerator: records what happens on which, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "compute"

    def is_synchronized_device(self) -> bool:
        return False

    def current_device(self) -> int:
        return 3

    def set_device(self, device: int) -> None:
        self.log.append(f"device {device}")

    def Event(self) -> Streams:  # noqa: N802
        return self

    def Stream(self) -> Streams:  # noqa: N802
        return self

    def record(self) -> None:
        self.log.append(f"event on {self.current}")

    def wait_event(self, event: object) -> None:
        self.log.append("side waits for event")

    def synchronize(self) -> None:
        self.log.append("host waits for side")

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.current = "side"
        yield
        self.current = "compute"


def test_copies_run_beside_the_steps_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    monkeypatch.setattr(saver_module, "get_accelerator", lambda: streams)
    reached = saver_module._reached()
    with saver_module.copying_after(reached):
        streams.log.append(f"copy on {streams.current}")
    expected = ["event on compute", "device 3", "side waits for event", "copy on side", "host waits for side"]
    assert streams.log == expected
