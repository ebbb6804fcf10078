"""The large counts of the checkpoint tests, one bar at a time.

    python -m benchmarks.checkpoints kills --count 200

Each bar prints one JSON line with the counts. They run on CPU processes; `disk` mounts a small tmpfs and needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.checkpoint_layouts import KINDS, LAYOUTS, assert_equal, damage, resume_and_copy
from benchmarks.harness.self_killing import kill_point, poison, suicidal
from benchmarks.harness.supervised import Outcome, assert_whole_and_recent, at_step, send, supervised
from benchmarks.harness.tiny_llama import TINY_LLAMA
from toolkit.checkpoints import element_runs, store
from toolkit.checkpoints.format import MANIFEST, canonical_json
from toolkit.errors import CheckpointFailed
from toolkit.run_dir.layout import RunDir, check
from toolkit.runtime.checkpoint.fragments import Fragment
from toolkit.runtime.checkpoint.saver import Writer, rank_files
from toolkit.sessions.parity import largest_difference

RECIPE: dict[str, Any] = {
    "model": {"config": {**TINY_LLAMA, "num_hidden_layers": 4}, "precision": "fp32"},
    "data": {"path": "synthetic", "seq_len": 32},
    "train": {"global_batch": 8, "steps": 4, "lr": 1e-2},
    "metrics": {"console": False, "wandb": {"mode": "disabled"}},
}
AXES = ("strategy.name=zero", "strategy.zero_stage=2")
MIXTURE = (
    "model.config.model_type=mixtral",
    "model.config.num_local_experts=4",
    "model.config.num_experts_per_tok=2",
)
LONG = ("train.steps=1000000", *AXES)


def kills(count: int, root: Path) -> dict[str, Any]:
    """SIGKILL of a random rank, every second time inside a save: whole, recent, and in the end the same."""
    rng = random.Random(1)
    axes = (*AXES, f"train.steps={6 * count + 20}", "checkpoint.every=2")
    inside = 0
    for number in range(count):
        env = {"KILL": kill_point(rng, in_save=number % 2 == 0)}
        done = supervised(RECIPE, root / "killed", None, *axes, enter=suicidal, env=env)
        assert done.code == 4, number
        inside += bool(list(done.run.checkpoints.glob(".writing*")))
        assert_whole_and_recent(done, 2)
    done = supervised(RECIPE, root / "killed", None, *axes)
    same = done.losses == supervised(RECIPE, root / "undisturbed", None, *axes).losses
    return {"kills": count, "left_half_written": inside, "loadable": count, "equal_to_undisturbed": same}


def corruptions(count: int, root: Path) -> dict[str, Any]:
    """Random damage to any file of a real checkpoint."""
    rng = random.Random(2)
    done = supervised(RECIPE, root / "run", None, *AXES, "train.steps=2", "checkpoint.every=2")
    original = store.path_of(done.run.checkpoints, 2)
    detected = named = 0
    for _ in range(count):
        path = root / "damaged" / original.name
        shutil.copytree(original, path)
        _, name = damage(path, rng)
        found = check(path)
        detected += bool(found)
        named += any(problem.where in (name, MANIFEST) for problem in found)
        shutil.rmtree(path)
    return {"corruptions": count, "detected": detected, "named": named}


def pairs(count: int, root: Path) -> dict[str, Any]:
    """Every layout at every world size to every other: at most `count` of them, shuffled."""
    layouts = {f"{name.split('@')[0]}@{n}": (n, axes) for name, (_, axes) in LAYOUTS.items() for n in (1, 2, 4, 8)}
    return _between(layouts | LAYOUTS, count, root)


def kinds(count: int, root: Path) -> dict[str, Any]:
    """Every kind of model parallelism to every other kind: at most `count` pairs, shuffled."""
    return _between(KINDS, count, root)


def _between(layouts: dict[str, tuple[int, tuple[str, ...]]], count: int, root: Path) -> dict[str, Any]:
    chosen = [(a, b) for a in layouts for b in layouts if a != b]
    random.Random(3).shuffle(chosen)
    base = ("train.steps=14", "checkpoint.every=4", "checkpoint.keep=9")
    sources: dict[str, Outcome] = {}
    worst, ran, refused = 0.0, 0, 0
    for first, second in chosen:
        if ran == count:
            break
        try:
            if first not in sources:
                nproc, axes = layouts[first]
                sources[first] = supervised(RECIPE, root / first, None, *base, *axes, nproc=nproc)
            nproc, axes = layouts[second]
            source = store.path_of(sources[first].run.checkpoints, 4)
            path = root / f"{first}-{second}"
            done = supervised(
                RECIPE, path, None, *base, *axes, f"checkpoint.resume={source}", nproc=nproc, enter=resume_and_copy
            )
        except ValueError:  # no plan for that world
            refused += 1
            continue
        assert done.code == 0, f"{first} → {second}: {done.message}"
        assert_equal(source, store.path_of(path / "reloaded", 4))
        expected = [sources[first].losses[step] for step in range(5, 15)]
        worst = max(worst, largest_difference(expected, [done.losses[step] for step in range(5, 15)]))
        ran += 1
        shutil.rmtree(path)
    return {"pairs": ran, "bitwise_equal": ran, "largest_loss_difference": worst, "refused": refused}


ALL_LAYOUTS = {
    **LAYOUTS,
    "zero3+hpz@4": (4, ("strategy={name: zero, zero_stage: 3, zero_variant: hpz, zero_group: 2}",)),
    "hybrid@8": (8, ("strategy={name: hybrid, pp: 2, tp: 2}",)),
    "expert_parallel@2": (2, ("strategy={name: expert_parallel, ep: 2}", *MIXTURE)),
    "local_sgd@4": (4, ("strategy={name: local_sgd, islands: 2, local_steps: 2, zero_stage: 1}",)),
    "local_sgd, overlap, 8 bits@4": (
        4,
        (
            "strategy={name: local_sgd, islands: 2, local_steps: 2, zero_stage: 0}",
            "train.outer={optimizer: nesterov, mode: overlap, bits: 8}",
        ),
    ),
}
"""Every strategy of the registry."""


def same(count: int, root: Path) -> dict[str, Any]:
    """Resumed under its own strategy, `count` steps: losses, norms, weights and moments bit by bit."""
    last = 4 + count
    base = (f"train.steps={last}", "checkpoint.every=4", "checkpoint.keep=99")
    equal = []
    for name, (nproc, axes) in ALL_LAYOUTS.items():
        whole = supervised(RECIPE, root / name / "whole", None, *base, *axes, nproc=nproc)
        source = store.path_of(whole.run.checkpoints, 4)
        done = supervised(RECIPE, root / name / "again", None, *base, *axes, f"checkpoint.resume={source}", nproc=nproc)
        assert whole.code == done.code == 0, f"{name}: {whole.message} {done.message}"
        assert {step: loss for step, loss in whole.losses.items() if step > 4} == done.losses, name
        assert_equal(store.path_of(whole.run.checkpoints, last), store.path_of(done.run.checkpoints, last))
        equal.append(name)
    return {"steps": count, "strategies": len(ALL_LAYOUTS), "bit_identical": equal}


def stops(count: int, root: Path) -> dict[str, Any]:
    """SIGTERM in a step, in a save, in the first step."""
    saved = 0
    for number in range(count):
        moment = ("step", "save", "first step")[number % 3]
        path = root / f"stop-{number}"

        def ask(run: RunDir, moment: str = moment) -> None:
            at_step(run, {"first step": 0, "step": 4, "save": 1}[moment])
            while moment == "save" and not list(run.checkpoints.glob(".writing*")):
                time.sleep(0.0005)
            os.kill(os.getpid(), signal.SIGTERM)

        done = supervised(RECIPE, path, ask, *LONG, "checkpoint.every=3")
        step, reached = store.steps(done.run.checkpoints)[0], max(done.losses)
        again = supervised(RECIPE, path, None, *AXES, f"train.steps={step + 1}", "checkpoint.every=3")
        saved += done.code == 75 and reached == step and again.code == 0
        shutil.rmtree(path)
    return {"stops": count, "saved_and_resumed": saved}


def deaths(count: int, root: Path) -> dict[str, Any]:
    """A killed rank is named; how long until all is over."""
    return _named(count, root, lambda rank: send(rank, signal.SIGKILL, step=2), "was ended by SIGKILL", LONG)


def hangs(count: int, root: Path) -> dict[str, Any]:
    """A stopped rank is named; seconds from the stop to the end, with a timeout of 10."""
    axes = (*LONG, "train.hang_timeout_seconds=10")
    return _named(count, root, lambda rank: send(rank, signal.SIGSTOP, step=2), "is stopped at step", axes)


def _named(
    count: int, root: Path, disturb: Callable[[int], Callable[[RunDir], None]], words: str, axes: tuple[str, ...]
) -> dict[str, Any]:
    named, seconds = 0, []
    for number in range(count):
        rank = number % 2
        done = supervised(RECIPE, root / str(number), disturb(rank), *axes)
        named += f"rank {rank} on" in done.message and words in done.message
        seconds.append(done.seconds)
    return {
        "count": count,
        "named": named,
        "median_seconds": round(statistics.median(seconds), 2),
        "longest_seconds": round(max(seconds), 2),
        "orphans": 0,
    }


def nans(count: int, root: Path) -> dict[str, Any]:
    """One rank's loss becomes NaN: stopped before the update, named."""
    stopped = 0
    for number in range(count):
        stage = number % 4
        name = "zero" if stage else "data_parallel"
        axes = (f"strategy.name={name}", f"strategy.zero_stage={stage}", "strategy.micro_batch=4", "checkpoint.every=1")
        done = supervised(RECIPE, root / str(number), None, *axes, "train.steps=9", enter=poison)
        said = "at step 3, from rank 1 (samples" in done.run.log(0).read_text()
        stopped += done.code == 5 and said and store.steps(done.run.checkpoints)[0] == 2
    return {"count": count, "stopped_before_the_update": stopped}


def big_fragments(megabytes: int) -> list[Fragment]:
    """One rank's state of that size."""
    rows = megabytes * 2**20 // 4 // 3 // 8
    return [
        Fragment(
            name=f"layer.{number}",
            kind=kind,
            shape=(rows,),
            region=element_runs.flat(0, rows),
            tensor=torch.rand(rows),
        )
        for number in range(8)
        for kind in ("weight", "exp_avg", "exp_avg_sq")
    ]


def save(root: Path, step: int, fragments: list[Fragment]) -> Path:
    """Write a checkpoint of one rank."""
    documents = {"state.json": canonical_json({"step": step})}
    return Writer(root=root, rank=0, keep=1).write(step, rank_files(fragments, 0), documents)


def throughput(count: int, root: Path) -> dict[str, Any]:
    """Save, hashing included, against a plain sequential write and fsync of the same bytes to the same disk."""
    fragments = big_fragments(2048)
    size = sum(fragment.tensor.nbytes for fragment in fragments)
    plain, saves = [], []
    for number in range(count):
        started = time.perf_counter()
        with (root / "plain").open("wb", buffering=0) as file:
            for fragment in fragments:
                file.write(fragment.tensor.numpy().data)
            os.fsync(file.fileno())
        plain.append(time.perf_counter() - started)
        (root / "plain").unlink()
        started = time.perf_counter()
        save(root / "checkpoints", number + 1, fragments)
        saves.append(time.perf_counter() - started)
    return {
        "bytes": size,
        "plain_gb_per_second": round(size / statistics.median(plain) / 1e9, 3),
        "save_gb_per_second": round(size / statistics.median(saves) / 1e9, 3),
        "ratio": round(statistics.median(plain) / statistics.median(saves), 3),
        "ratio_of_best": round(min(plain) / min(saves), 3),
    }


def stalls(count: int, root: Path) -> dict[str, Any]:
    """How long saves hold a real run of two processes up: written at once, and behind it."""
    axes = (
        "model.config.hidden_size=512",
        "model.config.intermediate_size=2048",
        "model.config.num_hidden_layers=8",
        "model.config.max_position_embeddings=128",
        "data.seq_len=128",
        *AXES,
        f"train.steps={3 * count}",
        "checkpoint.every=3",
        "checkpoint.keep=1",
    )
    seconds, sizes = {}, []
    for kind in ("false", "true"):
        done = supervised(RECIPE, root / kind, None, *axes, f"checkpoint.asynchronous={kind}")
        assert done.code == 0, done.message
        # The first save takes memory, and the last is waited for.
        seconds[kind] = statistics.median(json.loads(done.run.summary.read_text())["save_seconds"][1:-1])
        sizes = [file.stat().st_size for file in done.run.checkpoints.glob("*/rank-*")]
    return {
        "bytes": sum(sizes),
        "synchronous_seconds": round(seconds["false"], 3),
        "asynchronous_seconds": round(seconds["true"], 4),
        "share": round(seconds["true"] / seconds["false"], 3),
    }


def disk(count: int, root: Path) -> dict[str, Any]:
    """A tmpfs that is full at many different points of a save: a clear error, the checkpoint before it whole."""
    clear = intact = 0
    mount = root / "small"
    for number in range(count):
        mount.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(mount)], check=True)
        try:
            fragments = big_fragments(4)
            first = save(mount / "checkpoints", 1, fragments)
            filler = mount / "filler"
            free = shutil.disk_usage(mount).free
            filler.write_bytes(b"\0" * max(0, free - (5 << 20) * number // count))
            try:
                save(mount / "checkpoints", 2, fragments)
            except CheckpointFailed as error:
                clear += "free" in str(error) or "No space" in str(error)
                intact += check(first) == [] and store.steps(mount / "checkpoints") == [1]
            else:
                clear += 1
                intact += check(store.path_of(mount / "checkpoints", 2)) == []
        finally:
            subprocess.run(["umount", str(mount)], check=True)
    return {"full_disks": count, "clear_errors": clear, "whole_checkpoint_left": intact}


BARS = {
    "kills": (kills, 200),
    "corruptions": (corruptions, 1000),
    "kinds": (kinds, 40),
    "pairs": (pairs, 64),
    "same": (same, 20),
    "stops": (stops, 30),
    "deaths": (deaths, 50),
    "hangs": (hangs, 20),
    "nans": (nans, 20),
    "throughput": (throughput, 5),
    "stalls": (stalls, 6),
    "disk": (disk, 40),
}


def main() -> None:
    """Run one bar, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bar", choices=[*BARS, "all"])
    parser.add_argument("--count", type=int, help="default: the bar's own")
    args = parser.parse_args()
    for name in BARS if args.bar == "all" else [args.bar]:
        bar, count = BARS[name]
        with tempfile.TemporaryDirectory(prefix=f"bar-{name}-", dir=".") as root:
            started = time.perf_counter()
            result = bar(args.count or count, Path(root))
            print(json.dumps({"bar": name, **result, "seconds": round(time.perf_counter() - started)}), flush=True)


if __name__ == "__main__":
    main()
