"""Rehearsals against what they stand for: measured bytes of tiny models, predicted bytes of large ones, the recipes.

python -m benchmarks.rehearsals --harness [WORD ...]   # rehearsed against measured: real processes on this CPU
python -m benchmarks.rehearsals [WORD ...]             # predicted against rehearsed live bytes, at full size
python -m benchmarks.rehearsals --recipes [WORD ...]   # every shipped recipe at full size: does it fit?

Words select the rows whose name contains all of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness.tiny_llama import TINY_LLAMA
from toolkit.errors import ToolkitError
from toolkit.launching import launchers
from toolkit.recipe.file import load_recipe, make_recipe
from toolkit.runtime.rehearsal.report import PARTS, model_part
from toolkit.runtime.supervision.warm_pool import run_warm
from toolkit.sessions.rehearse import Rehearsal, rehearse, verdict
from toolkit.sessions.resolve import Resolved, resolve
from toolkit.units import GIB

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
TINY = {**TINY_LLAMA, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
"""Large enough for its tensors to outweigh those of the process around them."""
LORA = ("model.lora={rank: 4}",)
STRATEGIES: dict[str, tuple[int, tuple[str, ...]]] = {
    "data": (2, ("strategy.name=data_parallel",)),
    "data-accum": (2, ("strategy.name=data_parallel", "strategy.micro_batch=1")),
    "zero-1": (2, ("strategy.name=zero", "strategy.zero_stage=1")),
    "zero-2": (2, ("strategy.name=zero", "strategy.zero_stage=2")),
    "zero-2-accum": (2, ("strategy.name=zero", "strategy.zero_stage=2", "strategy.micro_batch=1")),
    "zero-3": (2, ("strategy.name=zero", "strategy.zero_stage=3", "strategy.zero_variant=plain")),
    "zero-3-accum": (2, ("strategy.name=zero", "strategy.zero_stage=3", "strategy.micro_batch=1")),
    "zero-2-offload": (2, ("strategy.name=zero", "strategy.zero_stage=2", "strategy.offload=cpu")),
    "zero-3-offload": (2, ("strategy.name=zero", "strategy.zero_stage=3", "strategy.offload=cpu_params")),
    "tensor": (2, ("strategy.name=tensor_parallel", "strategy.tp=2")),
    "pipeline": (2, ("strategy.name=pipeline", "strategy.pp=2", "strategy.micro_batch=2")),
    "sequence": (2, ("strategy.name=sequence_parallel", "strategy.sp=2")),
    "hybrid": (4, ("strategy.name=hybrid", "strategy.tp=2", "strategy.pp=2", "strategy.micro_batch=2")),
    "data-packed": (2, ("strategy.name=data_parallel",)),
    "sequence-packed": (2, ("strategy.name=sequence_parallel", "strategy.sp=2")),
    "data-lora": (2, ("strategy.name=data_parallel", *LORA)),
    "zero-3-lora": (2, ("strategy.name=zero", "strategy.zero_stage=3", *LORA)),
}
"""Name → (processes, overrides) of the tiny runs."""
VARIANTS = {
    "fp32": ("model.precision=fp32", "strategy.recompute=none"),
    "bf16": ("model.precision=bf16", "strategy.recompute=none"),
    "fp32-recompute": ("model.precision=fp32", "strategy.recompute=full"),
    "bf16-recompute": ("model.precision=bf16", "strategy.recompute=full"),
}
MEASUREMENTS = 2
"""Runs whose smaller peak counts: gloo's threads may free a tensor later than the code does, which only adds bytes."""
BOUND = 0.01
"""Largest relative difference between rehearsed and measured live bytes."""


@dataclass(frozen=True)
class TinyRow:
    """One tiny run, rehearsed and measured."""

    name: str
    rehearsed_bytes: int
    measured_bytes: int

    @property
    def difference(self) -> float:
        """Relative difference of the rehearsed peak."""
        return self.rehearsed_bytes / self.measured_bytes - 1


def tiny_names() -> Iterator[str]:
    """Names of all tiny runs."""
    for strategy in STRATEGIES:
        yield from (f"{strategy} {variant}" for variant in VARIANTS)


def tiny_row(name: str) -> TinyRow:
    """Rehearse all ranks of a tiny run, and run it in real processes."""
    strategy, variant = name.split()
    nproc, overrides = STRATEGIES[strategy]
    mapping: dict[str, Any] = {
        "name": "tiny",
        "model": {"config": dict(TINY), "precision": "fp32"},
        "data": {"path": "synthetic", "tokenizer": "bytes", "seq_len": 64},
        "train": {"global_batch": 8, "steps": 2, "lr": 1e-3},
        "metrics": {"console": False, "wandb": {"mode": "disabled"}},
    }
    with tempfile.TemporaryDirectory(prefix="rehearsals-") as folder:
        if strategy.endswith("packed"):
            mapping["data"]["path"] = str(Path(folder) / "short.jsonl")
            write_short_texts(Path(folder) / "short.jsonl")
        resolved = resolve(make_recipe(mapping, (*overrides, *VARIANTS[variant])), nproc)
        result = rehearse(resolved, "all")
        measured = min(_measured(resolved, Path(folder) / f"run-{number}") for number in range(MEASUREMENTS))
    return TinyRow(name, max(role.step.device_peak_bytes for role in result.roles), measured)


def _measured(resolved: Resolved, folder: Path) -> int:
    """Peak of live tensor bytes of the fullest rank, in real processes."""
    run, nproc = resolved.write(folder), resolved.chosen.plan.devices
    codes = run_warm(launchers.commands("local", run.path, nproc, "cpu"))
    if any(codes):
        raise RuntimeError(f"{resolved.chosen.plan.describe()} fails: {run.log(0).read_text()[-2000:]}")
    return int(json.loads(run.summary.read_text())["measured"]["memory_bytes"])


def write_short_texts(path: Path) -> None:
    """Write texts of which every row of 64 tokens holds two."""
    path.write_text("".join(json.dumps({"text": "the quick brown fox jumps over"}) + "\n" for _ in range(200)))


def harness(words: list[str]) -> int:
    """Print rehearsed against measured bytes of every tiny run; 1 if one is beyond the bound."""
    rows = []
    for name in tiny_names():
        if not all(word in name for word in words):
            continue
        try:
            row = tiny_row(name)
        except (ToolkitError, RuntimeError) as error:
            print(f"{name:28} {error}", flush=True)
            continue
        rows.append(row)
        sizes = f"{row.rehearsed_bytes / MIB:9.3f} {row.measured_bytes / MIB:9.3f} MiB"
        print(f"{name:28} {sizes} {row.difference:+7.2%}", flush=True)
    near = [row for row in rows if abs(row.difference) <= BOUND]
    print(f"{len(near)} of {len(rows)} within {BOUND:.0%}")
    return 0 if len(near) == len(rows) else 1


H100 = "{device: H100-SXM5-80GB, nodes: %d, devices_per_node: 8}"
ZERO_2 = ("strategy.name=zero", "strategy.zero_stage=2")
ZERO_3 = ("strategy.name=zero", "strategy.zero_stage=3", "strategy.zero_variant=plain", "strategy.offload=none")
LARGE: dict[str, tuple[str, int, dict[str, tuple[str, ...]]]] = {
    "llama-1b": (
        "llama-3.2-1b",
        1,
        {
            "data": ("strategy.name=data_parallel",),
            "zero-1": ("strategy.name=zero", "strategy.zero_stage=1", "strategy.offload=none"),
            "zero-2": (*ZERO_2, "strategy.offload=none"),
            "zero-3": ZERO_3,
            "sequence": ("strategy.name=sequence_parallel", "strategy.sp=4", "strategy.zero_stage=2"),
        },
    ),
    "llama-8b": (
        "llama-3.1-8b",
        1,
        {
            "zero-1": ("strategy.name=zero", "strategy.zero_stage=1", "strategy.offload=none"),
            "zero-2": (*ZERO_2, "strategy.offload=none"),
            "zero-2-offload": (*ZERO_2, "strategy.offload=cpu"),
            "zero-3": ZERO_3,
            "zero-3-offload": ("strategy.name=zero", "strategy.zero_stage=3", "strategy.offload=cpu_params"),
            "tensor": ("strategy.name=tensor_parallel", "strategy.tp=8", "strategy.zero_stage=0"),
            "pipeline": ("strategy.name=pipeline", "strategy.pp=4"),
            "sequence": ("strategy.name=sequence_parallel", "strategy.sp=8", "strategy.zero_stage=2"),
            "hybrid": ("strategy.name=hybrid", "strategy.tp=2", "strategy.pp=4", "strategy.sp=1"),
            "lora": ("strategy.name=data_parallel", "model.lora={rank: 16}"),
            "lora-zero-3": (*ZERO_3, "model.lora={rank: 16}"),
        },
    ),
    "qwen3-8b": (
        "qwen3-8b",
        1,
        {
            "zero-2": (*ZERO_2, "strategy.offload=none"),
            "zero-3": ZERO_3,
            "tensor": ("strategy.name=tensor_parallel", "strategy.tp=8", "strategy.zero_stage=0"),
            "pipeline": ("strategy.name=pipeline", "strategy.pp=4"),
        },
    ),
    "qwen3-32b": ("qwen3-32b", 4, {"zero-2": (*ZERO_2, "strategy.offload=cpu"), "zero-3": ZERO_3}),
    "gemma-27b": ("gemma-3-27b-text", 4, {"zero-3": ZERO_3}),
    "llama-70b": (
        "llama-3.1-70b",
        8,
        {
            "zero-3": ZERO_3,
            "hybrid": ("strategy.name=hybrid", "strategy.tp=8", "strategy.pp=4", "strategy.sp=1"),
            "lora-zero-3": (*ZERO_3, "model.lora={rank: 16}"),
        },
    ),
    "llama-405b": (
        "llama-3.1-405b",
        64,
        {
            "zero-3": ZERO_3,
            "hybrid": ("strategy.name=hybrid", "strategy.tp=8", "strategy.pp=16", "strategy.sp=1"),
        },
    ),
    "mixtral-8x7b": ("mixtral-8x7b", 4, {"zero-3": ZERO_3}),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", 4, {"zero-3": ZERO_3}),
    "gpt-oss-120b": ("gpt-oss-120b", 8, {"zero-3": ZERO_3}),
}
"""Name → (config, nodes of 8 H100, strategies)."""


def large(name: str) -> Rehearsal:
    """Rehearse the first rank (of a pipeline: of the first and the last stage) of `MODEL STRATEGY RECOMPUTE`."""
    model, strategy, recompute = name.split()
    config, nodes, axes = LARGE[model]
    mapping = {
        "name": "rehearsals",
        "model": {"path": config, "init": "scratch", "precision": "bf16"},
        "data": {"path": "synthetic", "tokenizer": "bytes", "seq_len": 4096},
        "train": {"global_batch": 32 * nodes, "steps": 2},
    }
    overrides = [*axes[strategy], f"cluster={H100 % nodes}", "strategy.micro_batch=1"]
    resolved = resolve(make_recipe(mapping, [*overrides, f"strategy.recompute={recompute}"]))
    plan = resolved.chosen.plan
    return rehearse(resolved, f"0,{plan.devices - plan.devices // plan.pp}" if plan.pp > 1 else "0")


def part_errors(result: Rehearsal) -> dict[str, float]:
    """Relative errors of the predicted parts that are above 5% of the peak."""
    memory = asdict(result.option.estimate.memory)
    fullest = max(result.roles, key=lambda role: role.step.device_peak_bytes).step
    found: dict[str, int] = {}
    for part in PARTS:
        found[model_part(part)] = found.get(model_part(part), 0) + fullest.parts[part]
    least = 0.05 * fullest.device_peak_bytes
    return {part: memory[part] / size - 1 for part, size in found.items() if size > least}


def predicted(words: list[str]) -> int:
    """Print predicted against rehearsed bytes by part, and the mean and worst difference."""
    differences = []
    for name in (f"{m} {s} {r}" for m, (_, _, axes) in LARGE.items() for s in axes for r in ("none", "full")):
        if not all(word in name for word in words):
            continue
        began = time.perf_counter()
        try:
            result = large(name)
        except ToolkitError as error:
            print(f"{name:34} {str(error).splitlines()[0]}", flush=True)
            continue
        fullest = max(result.roles, key=lambda role: role.step.device_peak_bytes)
        step, memory = fullest.step, asdict(result.option.estimate.memory)
        difference = result.predicted_bytes / step.device_peak_bytes - 1
        differences.append(abs(difference))
        sizes = f"{result.predicted_bytes / GIB:8.2f} {step.device_peak_bytes / GIB:8.2f}"
        print(
            f"{name:34} {sizes} {difference:+7.1%} {time.perf_counter() - began:4.0f} s, "
            f"{fullest.cpu_seconds:.0f} s of CPU, layers {fullest.ran_layers}",
            flush=True,
        )
        print("    predicted " + _parts({part: memory[part] for part in map(model_part, PARTS)}))
        print(f"    rank {fullest.rank:4} " + _parts(step.parts), flush=True)
        off = {part: error for part, error in part_errors(result).items() if abs(error) > 0.1}
        print(
            f"    {step.peak_at}; parts beyond 10%: " + (", ".join(f"{p} {e:+.0%}" for p, e in off.items()) or "none")
        )
    if differences:
        print(f"{len(differences)} rows: mean {mean(differences):.1%}, worst {max(differences):.1%}")
    return 0


def _parts(parts: dict[str, int]) -> str:
    return " ".join(f"{part} {size / GIB:.2f}" for part, size in parts.items())


def recipes(words: list[str]) -> int:
    """Rehearse the shipped recipes at full size; 1 if one does not fit or can't be rehearsed."""
    missed = 0
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        if not all(word in path.stem for word in words):
            continue
        began = time.perf_counter()
        overrides = ["cluster=laptop-cpu"] if path.stem == "demo" else []
        try:
            result = rehearse(resolve(load_recipe(path, overrides)))
        except ToolkitError as error:
            print(f"{path.stem:46} {str(error).splitlines()[0]}", flush=True)
            missed += 1
            continue
        missed += not result.fits or bool(result.mismatches)
        matches = f"{len(result.mismatches)} mismatches" if result.mismatches else "collectives match"
        print(f"{path.stem:46} {verdict(result)}; {matches}; {time.perf_counter() - began:.0f} s", flush=True)
    return 1 if missed else 0


def main() -> int:
    """Run one of the three comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", action="store_true", help="rehearsed against measured bytes of tiny models")
    parser.add_argument("--recipes", action="store_true", help="the shipped recipes")
    parser.add_argument("words", nargs="*", help="select rows")
    args = parser.parse_args()
    chosen: Any = harness if args.harness else recipes if args.recipes else predicted
    return int(chosen(args.words))


if __name__ == "__main__":
    raise SystemExit(main())
