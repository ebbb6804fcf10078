"""Rehearsals against what they stand for: measured bytes of tiny models, predicted bytes of large ones, the recipes.

python -m benchmarks.rehearsals --harness [WORD ...]   # rehearsed against measured: real processes on this CPU
python -m benchmarks.rehearsals [WORD ...]             # predicted against rehearsed live bytes, at full size; rows
                                                       # in data/rehearsals.jsonl are not rehearsed again
python -m benchmarks.rehearsals --recipes [WORD ...]   # every shipped recipe at full size: does it fit? Rows in
                                                       # data/recipes.jsonl of the same code and plan are not repeated
python -m benchmarks.rehearsals --recipes --kept       # print these rows only

Words select the rows whose name contains all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness.recipe_rehearsals import recipes
from benchmarks.harness.tiny_llama import TINY_LLAMA
from toolkit.cost.estimate import Memory
from toolkit.cost.memory import memory
from toolkit.errors import ToolkitError
from toolkit.launching import launchers
from toolkit.plans.job import make_job
from toolkit.plans.plan import Plan
from toolkit.recipe.file import make_recipe
from toolkit.recipe.sections import Recipe
from toolkit.runtime.rehearsal.report import PARTS, model_part
from toolkit.runtime.supervision.warm_pool import enter_worker, run_warm
from toolkit.sessions import rehearse as session
from toolkit.sessions.rehearse import rehearse
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
    "pipeline": (2, ("strategy={name: pipeline, pp: 2, schedule: 1f1b, micro_batch: 2}",)),
    "interleaved": (2, ("strategy={name: pipeline, pp: 2, schedule: interleaved, chunks: 2, micro_batch: 2}",)),
    "sequence": (2, ("strategy.name=sequence_parallel", "strategy.sp=2")),
    "hybrid": (4, ("strategy={name: hybrid, tp: 2, pp: 2, schedule: 1f1b, micro_batch: 2}",)),
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
"""Runs at most. The smaller peak counts: a thread of gloo that was not scheduled in the pause only adds bytes."""
PAUSE_SECONDS = 0.01
"""How long measured ranks pause after a collective: gloo's threads (torch 2.13) hold its tensors for a moment longer
than the wait for it lasts, on a busy machine for long enough to be part of the peak."""
BOUND = 0.01
"""Largest relative difference between rehearsed and measured live bytes."""
EXPERT_BOUND = 0.05
"""Largest relative difference between predicted and rehearsed live bytes of expert plans."""
MEAN_BOUND, WORST_BOUND, PART_BOUND = 0.03, 0.08, 0.1
"""Largest mean and single relative difference between predicted and rehearsed live bytes, and that of a part."""


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
        # A rehearsal stands for a GPU, whose layers keep more than those of `host_kernels.py` do.
        "model": {"config": dict(TINY), "precision": "fp32", "kernels": "none"},
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
        rehearsed = max(role.step.device_peak_bytes for role in result.roles)
        runs = []
        while len(runs) < MEASUREMENTS and not any(abs(rehearsed / one - 1) <= BOUND for one in runs):
            runs.append(_measured(resolved, Path(folder) / f"run-{len(runs)}"))
    return TinyRow(name, rehearsed, min(runs))


def _measured(resolved: Resolved, folder: Path) -> int:
    """Peak of live tensor bytes of the fullest rank, in real processes."""
    run, nproc = resolved.write(folder), resolved.chosen.plan.devices
    codes = run_warm(launchers.commands("local", run.path, nproc, "cpu"), _enter_paused)
    if any(codes):
        raise RuntimeError(f"{resolved.chosen.plan.describe()} fails: {run.log(0).read_text()[-2000:]}")
    return int(json.loads(run.summary.read_text())["measured"]["memory_bytes"])


def _enter_paused(argv: tuple[str, ...], env: dict[str, str]) -> None:
    """Entry of a measured worker: pauses after every collective that it waits for, and takes products without oneDNN.

    oneDNN packs the matrices of 16-bit products in workspaces whose size depends on the CPU's instruction set (torch
    2.13). They are no tensors: docs/rehearsal.md leaves the workspaces of kernels out.
    """
    import torch
    import torch.distributed as td

    torch.backends.mkldnn.enabled = False
    wait: Any = td.Work.wait

    def wait_and_pause(self: td.Work, *args: Any) -> Any:
        result = wait(self, *args)
        time.sleep(PAUSE_SECONDS)
        return result

    td.Work.wait = wait_and_pause  # type: ignore[method-assign]
    enter_worker(argv, env)


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
ZERO_1 = ("strategy.name=zero", "strategy.zero_stage=1", "strategy.offload=none")
ZERO_2 = ("strategy.name=zero", "strategy.zero_stage=2", "strategy.offload=none")
ZERO_2_OFFLOAD = ("strategy.name=zero", "strategy.zero_stage=2", "strategy.offload=cpu")
ZERO_3 = ("strategy.name=zero", "strategy.zero_stage=3", "strategy.zero_variant=plain", "strategy.offload=none")
ZERO_3_OFFLOAD = (
    "strategy.name=zero", "strategy.zero_stage=3", "strategy.zero_variant=plain", "strategy.offload=cpu_params",
)  # fmt: skip
TENSOR = ("strategy.name=tensor_parallel", "strategy.tp=8", "strategy.zero_stage=1")
PIPELINE = ("strategy.name=pipeline", "strategy.pp=4")
SEQUENCE = ("strategy.name=sequence_parallel", "strategy.sp=8", "strategy.zero_stage=2")
ADAPTERS = "model.lora={rank: 16}"
QUANTIZED = ("model.lora={rank: 16, quantize: 4bit}", "model.init=pretrained")


def _hybrid(tp: int, pp: int) -> tuple[str, ...]:
    return "strategy.name=hybrid", f"strategy.tp={tp}", f"strategy.pp={pp}", "strategy.sp=1"


def _experts(ep: int, zero: int, *more: str) -> tuple[str, ...]:
    return "strategy.name=expert_parallel", f"strategy.ep={ep}", f"strategy.zero_stage={zero}", "strategy.pp=1", *more


STAGES = ("strategy.pp=4", "strategy.schedule=1f1b")


ATTENTION_ADAPTERS = "model.lora={rank: 16, targets: [q_proj, k_proj, v_proj, o_proj]}"
LARGE: dict[str, tuple[str, int, dict[str, tuple[str, ...]]]] = {
    "llama-1b": (
        "llama-3.2-1b",
        1,
        {
            "data": ("strategy.name=data_parallel",),
            "zero-1": ZERO_1,
            "zero-2": ZERO_2,
            "zero-2-offload": ZERO_2_OFFLOAD,
            "zero-3": ZERO_3,
            "zero-3-offload": ZERO_3_OFFLOAD,
            "sequence": ("strategy.name=sequence_parallel", "strategy.sp=4", "strategy.zero_stage=2"),
            "lora": ("strategy.name=data_parallel", ADAPTERS),
            "qlora": ("strategy.name=data_parallel", *QUANTIZED),
        },
    ),
    "llama-8b": (
        "llama-3.1-8b",
        1,
        {
            "zero-1": ZERO_1,
            "zero-2": ZERO_2,
            "zero-2-offload": ZERO_2_OFFLOAD,
            "zero-3": ZERO_3,
            "zero-3-offload": ZERO_3_OFFLOAD,
            "tensor": TENSOR,
            "pipeline": PIPELINE,
            "sequence": SEQUENCE,
            "hybrid": _hybrid(2, 4),
            "lora": ("strategy.name=data_parallel", ADAPTERS),
            "qlora": ("strategy.name=data_parallel", *QUANTIZED),
            "lora-zero-3": (*ZERO_3, ADAPTERS),
        },
    ),
    "qwen3-8b": (
        "qwen3-8b",
        1,
        {
            "zero-1": ZERO_1,
            "zero-2": ZERO_2,
            "zero-2-offload": ZERO_2_OFFLOAD,
            "zero-3": ZERO_3,
            "tensor": TENSOR,
            "pipeline": PIPELINE,
            "sequence": SEQUENCE,
            "lora": ("strategy.name=data_parallel", ADAPTERS),
            "qlora": ("strategy.name=data_parallel", *QUANTIZED),
        },
    ),
    "qwen3-32b": (
        "qwen3-32b",
        4,
        {
            "zero-2-offload": ZERO_2_OFFLOAD,
            "zero-3": ZERO_3,
            "hybrid": _hybrid(8, 4),
            "lora-zero-3": (*ZERO_3, ADAPTERS),
            "qlora": ("strategy.name=data_parallel", *QUANTIZED),
        },
    ),
    "gemma-27b": (
        "gemma-3-27b-text",
        4,
        {
            "zero-3": ZERO_3,
            "zero-3-offload": ZERO_3_OFFLOAD,
            "hybrid": _hybrid(8, 4),
            "lora-zero-3": (*ZERO_3, ADAPTERS),
            "qlora": ("strategy.name=data_parallel", *QUANTIZED),
        },
    ),
    "llama-70b": (
        "llama-3.1-70b",
        8,
        {
            "qlora": ("strategy.name=data_parallel", *QUANTIZED),
            "zero-3": ZERO_3,
            "zero-3-offload": ZERO_3_OFFLOAD,
            "hybrid": _hybrid(8, 4),
            "lora-zero-3": (*ZERO_3, ADAPTERS),
        },
    ),
    "llama-405b": ("llama-3.1-405b", 64, {"zero-3": ZERO_3, "hybrid": _hybrid(8, 16)}),
    "mixtral-8x7b": (
        "mixtral-8x7b",
        4,
        {
            "zero-3": ZERO_3,
            "lora-zero-3": (*ZERO_3, ADAPTERS),
            "ep-zero-1": _experts(8, 1),
            "ep-zero-2": _experts(8, 2),
            "ep-zero-3": _experts(8, 3),
            "ep-tp": _experts(4, 1, "strategy.tp=2"),
            "ep-pp": _experts(8, 1, *STAGES),
        },
    ),
    "qwen3-30b-a3b": (
        "qwen3-30b-a3b",
        4,
        {
            "zero-3": ZERO_3,
            "zero-3-offload": ZERO_3_OFFLOAD,
            "ep-zero-1": _experts(8, 1),
            "ep-zero-2": _experts(8, 2),
            "ep-zero-3": _experts(8, 3),
            "ep-pp": _experts(8, 1, *STAGES),
        },
    ),
    "gpt-oss-120b": (
        "gpt-oss-120b",
        8,
        {
            "zero-3": ZERO_3,
            "zero-3-offload": ZERO_3_OFFLOAD,
            "ep-lora": _experts(8, 1, ATTENTION_ADAPTERS),
            "ep-zero-1": _experts(8, 1),
            "ep-zero-3": _experts(8, 3),
            "ep-pp": _experts(8, 1, *STAGES),
        },
    ),
    "deepseek-v3-short": (
        "deepseek-v3",
        32,
        {
            "ep-pp": _experts(8, 1, *STAGES),
            "ep-interleaved": _experts(8, 1, "strategy.pp=4", "strategy.schedule=interleaved", "strategy.chunks=4"),
            "ep-zero-3": _experts(8, 3),
        },
    ),
}
"""Name → (config, nodes of 8 H100, strategies)."""
LAYERS = {"deepseek-v3-short": 16}
"""Layers of models that are rehearsed with fewer than they have: pipeline stages of the full one have as many."""
RESULTS = Path(__file__).parent / "data" / "rehearsals.jsonl"
"""Rehearsed rows, one JSON object per line. A row that is there is not rehearsed again; its prediction is new."""


def large_names() -> Iterator[str]:
    """`MODEL STRATEGY RECOMPUTE` of all rows."""
    for model, (_, _, axes) in LARGE.items():
        yield from (f"{model} {strategy} {recompute}" for strategy in axes for recompute in ("none", "full"))


def large_recipe(name: str) -> Recipe:
    """4,096 tokens per packed row, micro-batches of one row, 4 of them without a pipeline."""
    model, strategy, recompute = name.split()
    config, nodes, axes = LARGE[model]
    section: dict[str, Any] = {"path": config}
    if model in LAYERS:
        values = json.loads((ROOT / "configs" / "models" / f"{config}.json").read_text(encoding="utf-8"))
        section = {"config": {**values, "num_hidden_layers": LAYERS[model]}}
    mapping = {
        "name": "rehearsals",
        "model": {**section, "init": "scratch", "precision": "bf16"},
        "data": {"path": "texts.jsonl", "tokenizer": "bytes", "seq_len": 4096, "packing": True},
        "train": {"global_batch": 32 * nodes, "steps": 2},
    }
    overrides = [*axes[strategy], f"cluster={H100 % nodes}", "strategy.micro_batch=1"]
    return make_recipe(mapping, [*overrides, f"strategy.recompute={recompute}"])


def large(name: str) -> dict[str, Any]:
    """Rehearse the first rank of a row (of a pipeline: of some stages); a line of the results."""
    began = time.perf_counter()
    resolved = resolve(large_recipe(name))
    plan = resolved.chosen.plan
    stage = plan.devices // plan.pp
    ranks = [0, plan.devices - stage] if plan.pp > 1 else [0]
    if plan.ep > 1 and plan.pp > 2:  # the first stage may have dense layers
        ranks.insert(1, stage)
    result = rehearse(resolved, ",".join(map(str, ranks)))
    return {
        "row": name,
        "plan": asdict(plan),
        "wall_seconds": round(time.perf_counter() - began, 1),
        "ranks": [
            {
                "rank": role.rank,
                "peak_bytes": role.step.device_peak_bytes,
                "parts": role.step.parts,
                "start_bytes": role.start.device_peak_bytes,
                "host_start_bytes": role.start.host_peak_bytes,
                "peak_at": role.step.peak_at,
                "ran_layers": role.ran_layers,
                "cpu_seconds": round(role.cpu_seconds, 1),
                "resident_bytes": role.resident_bytes,
                "largest": [[one.part, list(one.shape), one.dtype, one.where] for one in role.step.largest],
            }
            for role in result.roles
        ],
    }


@dataclass(frozen=True)
class LargeRow:
    """A rehearsed row next to what the memory model says now."""

    name: str
    fullest: dict[str, Any]
    """The rank with the highest peak."""
    predicted: Memory

    @classmethod
    def of(cls, record: dict[str, Any]) -> LargeRow:
        """From a line of the results."""
        fullest = max(record["ranks"], key=lambda rank: int(rank["peak_bytes"]))
        plan = Plan(**{**record["plan"], "pipeline_bounds": tuple(record["plan"]["pipeline_bounds"])})
        return cls(record["row"], fullest, memory(plan, make_job(large_recipe(record["row"]))))

    @property
    def predicted_bytes(self) -> int:
        """Predicted live bytes."""
        return self.predicted.total - self.predicted.overhead

    @property
    def difference(self) -> float:
        """Relative difference of the predicted peak."""
        return self.predicted_bytes / int(self.fullest["peak_bytes"]) - 1

    @property
    def part_errors(self) -> dict[str, float]:
        """Relative errors of the predicted parts that are above 5% of the peak."""
        found: dict[str, int] = {}
        for part in PARTS:
            found[model_part(part)] = found.get(model_part(part), 0) + self.fullest["parts"][part]
        least = 0.05 * self.fullest["peak_bytes"]
        return {part: getattr(self.predicted, part) / size - 1 for part, size in found.items() if size > least}

    def lines(self) -> str:
        """Figures and parts, on several lines."""
        rank, own = self.fullest, asdict(self.predicted)
        off = ", ".join(f"{part} {error:+.0%}" for part, error in self.part_errors.items() if abs(error) > PART_BOUND)
        return "\n".join(
            [
                f"{self.name:34} {self.predicted_bytes / GIB:8.2f} {rank['peak_bytes'] / GIB:8.2f} "
                f"{self.difference:+7.1%}  {rank['cpu_seconds']:.0f} s of CPU, layers {rank['ran_layers']}",
                "    predicted " + _parts({part: own[part] for part in dict.fromkeys(map(model_part, PARTS))}),
                f"    rank {rank['rank']:4} " + _parts(rank["parts"]),
                f"    {rank['peak_at']}; parts beyond 10%: {off or 'none'}",
            ]
        )


def large_rows(path: Path = RESULTS) -> list[LargeRow]:
    """Every rehearsed row; of several lines for a row, the last."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [LargeRow.of(record) for record in {one["row"]: one for one in map(json.loads, lines)}.values()]


class ForkedServer:
    """`session.Process` forked from this one, which has imported everything: a row starts at once."""

    def __init__(self, backend: str, files: Sequence[str]) -> None:
        from toolkit.runtime.rehearsal import server, stand_ins

        stand_ins.import_all()
        self._code: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                code = server.main(list(files))
            finally:
                os._exit(code)

    def poll(self, flags: int = os.WNOHANG) -> int | None:
        """Exit code; None while it runs."""
        if self._code is None:
            ended, status = os.waitpid(self._pid, flags)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def kill(self) -> None:
        """Kill the process if it still runs."""
        if self.poll() is None:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until the process has ended."""
        self.poll(0)


def fork_servers() -> None:
    """Fork rehearsals for GPUs from this process; those for CPUs need another accelerator, and start on their own."""
    start = session._start
    os.environ["DS_ACCELERATOR"] = "cuda"  # before DeepSpeed is imported; ranks replace it by the fake device

    def forked(backend: str, files: Sequence[str]) -> Any:
        if backend == "cpu":
            os.environ.pop("DS_ACCELERATOR", None)
            return start(backend, files)
        os.environ["DS_ACCELERATOR"] = "cuda"
        return ForkedServer(backend, files)

    session._start = forked  # type: ignore[assignment]


def predicted(words: list[str]) -> int:
    """Rehearse rows that have no result yet, then print all; 1 if a bar is missed."""
    fork_servers()
    spec_of = session.spec_of
    session.spec_of = lambda *args: replace(spec_of(*args), evaluates=False)  # type: ignore[assignment]
    chosen = [name for name in large_names() if all(word in name for word in words)]
    for name in chosen:
        if name in {row.name for row in large_rows()}:
            continue
        try:
            record = large(name)
        except ToolkitError as error:
            print(f"{name:34} {str(error).splitlines()[0]}", flush=True)
            continue
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(LargeRow.of(record).lines(), f"({record['wall_seconds']:.0f} s)", flush=True)
    rows = [row for row in large_rows() if row.name in chosen]
    return summary(rows) if rows else 1


def summary(rows: Sequence[LargeRow]) -> int:
    """Print all rows, and how the bars stand."""
    for row in rows:
        print(row.lines(), flush=True)
    differences = [abs(row.difference) for row in rows]
    off = sum(abs(error) > PART_BOUND for row in rows for error in row.part_errors.values())
    worst = max(rows, key=lambda row: abs(row.difference))
    print(f"{len(rows)} rows: mean {mean(differences):.1%}, worst {abs(worst.difference):.1%} ({worst.name})")
    print(f"{off} of {sum(len(row.part_errors) for row in rows)} parts beyond 10%")
    return 0 if mean(differences) <= MEAN_BOUND and max(differences) <= WORST_BOUND and not off else 1


def _parts(parts: dict[str, int]) -> str:
    return " ".join(f"{part} {size / GIB:.2f}" for part, size in parts.items())


def main() -> int:
    """Run one of the three comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", action="store_true", help="rehearsed against measured bytes of tiny models")
    parser.add_argument("--recipes", action="store_true", help="the shipped recipes")
    parser.add_argument("--kept", action="store_true", help="print the rows of recipes, rehearse nothing")
    parser.add_argument("words", nargs="*", help="select rows")
    args = parser.parse_args()
    if args.recipes:
        fork_servers()
        return recipes(args.words, kept=args.kept)
    return harness(args.words) if args.harness else predicted(args.words)


if __name__ == "__main__":
    raise SystemExit(main())
