"""Layouts that checkpoints are read under, a worker that copies what it has loaded, and a comparison bit by bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoints.format import (
    canonical_json,
)
from toolkit.runtime.checkpoint import resume
from toolkit.runtime.checkpoint.fragments import share
from toolkit.runtime.checkpoint.reader import Reader
from toolkit.runtime.checkpoint.saver import Writer, rank_files
from toolkit.runtime.supervision.warm_pool import enter_worker

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "data_parallel@2": (2, ("strategy.name=data_parallel",)),
    "zero1@4": (4, ("strategy.name=zero", "strategy.zero_stage=1")),
    "tensor_parallel@2": (2, ("strategy.name=tensor_parallel", "strategy.tp=2")),
    "zero2@2": (2, ("strategy.name=zero", "strategy.zero_stage=2")),
    "hybrid@4": (4, ("strategy.name=hybrid", "strategy.pp=2", "strategy.tp=2")),
    "data_parallel@1": (1, ("strategy.name=data_parallel",)),
    "zero3@2": (2, ("strategy.name=zero", "strategy.zero_stage=3")),
    "pipeline@2": (2, ("strategy.name=pipeline", "strategy.pp=2")),
    "interleaved@2": (2, ("strategy={name: pipeline, pp: 2, schedule: interleaved, chunks: 2, micro_batch: 1}",)),
    "zero_bubble@2": (2, ("strategy={name: pipeline, pp: 2, schedule: zero_bubble, micro_batch: 1}",)),
    "zero3+cpu_params@2": (2, ("strategy.name=zero", "strategy.zero_stage=3", "strategy.offload=cpu_params")),
    "sequence_parallel@2": (2, ("strategy.name=sequence_parallel", "strategy.sp=2")),
    "zero3@4": (4, ("strategy.name=zero", "strategy.zero_stage=3")),
    "zero2+cpu@2": (2, ("strategy.name=zero", "strategy.zero_stage=2", "strategy.offload=cpu")),
}

_TENSOR, _PIPELINE = "name: tensor_parallel, tp: 2", "name: pipeline, pp: 2, micro_batch: 1"
_SEQUENCE, _HYBRID = "name: sequence_parallel, zero_stage: 1", "name: hybrid, zero_stage: 1, micro_batch: 1"
_KINDS = {
    "zero3@2": "name: zero, zero_stage: 3",
    "tensor, complete residuals@2": f"{_TENSOR}, sequence_sharded: false",
    "tensor, shares of tokens@2": f"{_TENSOR}, sequence_sharded: true",
    "pipeline@2": f"{_PIPELINE}, schedule: 1f1b",
    "interleaved@2": f"{_PIPELINE}, schedule: interleaved, chunks: 2",
    "zero_bubble@2": f"{_PIPELINE}, schedule: zero_bubble",
    "sequence@2": f"{_SEQUENCE}, sp: 2, cp: 1",
    "ring@2": f"{_SEQUENCE}, sp: 1, cp: 2",
    "ring of groups@4": f"{_SEQUENCE}, sp: 2, cp: 2",
    "tensor, ring@4": f"{_HYBRID}, tp: 2, pp: 1, sp: 1, cp: 2",
    "tensor, pipeline@4": f"{_HYBRID}, tp: 2, pp: 2, schedule: 1f1b",
    "tensor, interleaved@4": f"{_HYBRID}, tp: 2, pp: 2, schedule: interleaved, chunks: 2",
    "pipeline, sequence@4": f"{_HYBRID}, tp: 1, pp: 2, sp: 2, cp: 1, schedule: 1f1b",
    "interleaved, ring@4": f"{_HYBRID}, tp: 1, pp: 2, sp: 1, cp: 2, schedule: interleaved, chunks: 2",
}
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    name: (int(name.split("@")[1]), (f"strategy={{{axes}}}",)) for name, axes in _KINDS.items()
}
"""Every kind of model parallelism, with the fewest ranks that it needs."""


def resume_and_copy(argv: tuple[str, ...], env: dict[str, str]) -> None:
    """A worker that, right after loading, writes what it has loaded as a checkpoint beside the run."""
    original = resume.resume

    def spy(reader: Any, state: Any, order: Any, recipe: Any, world: Any) -> Any:
        result = original(reader, state, order, recipe, world)
        files = rank_files(share(state.fragments()), world.rank)
        root = Path(argv[argv.index("--run-dir") + 1]) / "reloaded"
        documents = {"state.json": canonical_json(reader.state)}
        Writer(root=root, rank=world.rank, keep=9).write(reader.state["step"], files, documents)
        return result

    resume.resume = spy
    enter_worker(argv, env)


def assert_equal(first: Path, second: Path) -> None:
    """Every weight and moment, bit by bit."""
    a, b = Reader.open(first), Reader.open(second)
    assert a.index.keys() == b.index.keys()
    for name, parameter in a.index.items():
        assert parameter.kinds() == b.index[name].kinds() >= {"weight", "exp_avg", "exp_avg_sq"}
        for kind in parameter.kinds():
            assert torch.equal(a.full(name, kind), b.full(name, kind)), f"{name} {kind}"


def damage(path: Path, rng: random.Random) -> tuple[str, str]:
    """One random corruption of a random file: (what, file)."""
    kind = rng.choice(["flip", "truncate", "delete", "swap", "grow"])
    names = sorted(p.name for p in path.iterdir())
    name = rng.choice(names)
    data = bytearray((path / name).read_bytes())
    if kind == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (path / name).write_bytes(data)
    elif kind == "truncate":
        (path / name).write_bytes(data[: rng.randrange(len(data))])
    elif kind == "grow":
        (path / name).write_bytes(data + b"\0")
    elif kind == "delete":
        (path / name).unlink()
    else:
        other = rng.choice([n for n in names if n != name])
        (path / name).write_bytes((path / other).read_bytes())
        (path / other).write_bytes(data)
    return kind, name
