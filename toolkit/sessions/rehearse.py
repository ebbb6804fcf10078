"""Rehearse the chosen plan: pick ranks, run them on fake tensors, match their collectives, judge whether they fit."""

from __future__ import annotations

import importlib
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.cost.calibration import CALIBRATION
from toolkit.cost.communication import traffic_bytes
from toolkit.cost.execution import of_plan
from toolkit.errors import BadInput, NotRehearsable, RankFailed
from toolkit.launching.environment import environment
from toolkit.launching.launchers import Command, import_path
from toolkit.planner.search import Option
from toolkit.plans.job import raw_config
from toolkit.plans.pipeline_orders import boundaries
from toolkit.plans.plan import Plan
from toolkit.recipe.data_checks import texts_per_sample
from toolkit.recipe.sections import Recipe
from toolkit.runtime.rehearsal.report import Collective, RehearsalSpec, RoleFailed, RoleReport
from toolkit.runtime.supervision.warm_pool import WarmProcess
from toolkit.sessions.resolve import Resolved
from toolkit.units import GIB

WORKER = "toolkit.runtime.rehearsal.server"
POLL_SECONDS = 0.1
Process = subprocess.Popen[bytes] | WarmProcess
Progress = Callable[[int, int, float], object]
"""Called with (ranks done, ranks in all, seconds left)."""


@dataclass(frozen=True)
class Mismatch:
    """The first difference between two ranks of a group."""

    group: tuple[int, ...]
    ranks: tuple[int, int]
    what: str

    def to_json(self) -> dict[str, Any]:
        """As in `toolkit rehearse --json`."""
        return {"group": list(self.group), "ranks": list(self.ranks), "what": self.what}


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The rehearsed ranks of a plan, next to its prediction."""

    option: Option
    roles: tuple[RoleReport, ...]
    mismatches: tuple[Mismatch, ...]
    context_bytes: int
    """Device context and communication buffers, which are no tensors: an estimate."""
    margin: float
    """Fraction of live bytes that is added for fragmentation: an estimate."""
    seconds: float
    steps: int
    predicted_traffic: Mapping[str, float]
    """Bytes per step by axis (`tp`, `sp`, `pp`, `dp`) that the cost model's seconds are of."""

    @property
    def predicted_bytes(self) -> int:
        """Predicted live bytes on the fullest device, without overhead."""
        memory = self.option.estimate.memory
        return memory.total - memory.overhead

    def needed_bytes(self, role: RoleReport) -> int:
        """Device memory that a rank needs: its peak, context and buffers, and the margin."""
        return round(role.device_peak_bytes * (1 + self.margin)) + self.context_bytes

    @property
    def fits(self) -> bool:
        """Whether every rehearsed rank fits on its device."""
        return all(self.needed_bytes(role) <= self.option.estimate.memory_limit_bytes for role in self.roles)

    def traffic(self, role: RoleReport) -> dict[str, tuple[int, int]]:
        """Axis → bytes per step (predicted, rehearsed); `other`: collectives over ranks of several axes."""
        plan, found = self.option.plan, {}
        neighbours = boundaries(plan.schedule, plan.pp, plan.chunks, role.stage)
        for axis, size in self.predicted_traffic.items():
            found[axis] = [round(size) * (neighbours if axis == "pp" else 1), 0]
        for row in role.step.traffic:
            found.setdefault(axis_of(row["kind"], row["group"], plan), [0, 0])[1] += row["bytes"]
        return {axis: (predicted, rehearsed) for axis, (predicted, rehearsed) in found.items() if predicted + rehearsed}

    def to_json(self) -> dict[str, Any]:
        """The output of `toolkit rehearse --json`."""
        return {
            "plan": self.option.to_json(),
            "fits": self.fits,
            "context_bytes": self.context_bytes,
            "margin": self.margin,
            "memory_limit_bytes": self.option.estimate.memory_limit_bytes,
            "seconds": self.seconds,
            "roles": [self._role_json(role) for role in self.roles],
            "mismatches": [mismatch.to_json() for mismatch in self.mismatches],
        }

    def _role_json(self, role: RoleReport) -> dict[str, Any]:
        step = role.step
        return {
            "rank": role.rank,
            "stage": role.stage,
            "tensor": role.tensor,
            "data": role.data,
            "host_start_bytes": role.start.host_peak_bytes,
            "device_start_bytes": role.start.device_peak_bytes,
            "device_peak_bytes": step.device_peak_bytes,
            "peaks": {phase.name: phase.device_peak_bytes for phase in role.phases},
            "needed_bytes": self.needed_bytes(role),
            "predicted_bytes": self.predicted_bytes,
            "parts": step.parts,
            "peak_at": step.peak_at,
            "flops": step.flops,
            "host_syncs": sum(step.host_syncs.values()),
            "host_sync_sites": step.host_syncs,
            "host_copies": step.host_copies,
            "largest_tensors": [
                {"shape": list(t.shape), "dtype": t.dtype, "bytes": t.bytes, "part": t.part, "where": t.where}
                for t in step.largest
            ],
            "collectives": step.traffic,
            "traffic": {
                axis: {"predicted_bytes": predicted, "rehearsed_bytes": rehearsed}
                for axis, (predicted, rehearsed) in self.traffic(role).items()
            },
            "square_tensors": None if role.square_tensors is None else sum(role.square_tensors.values()),
            "square_tensor_sites": role.square_tensors,
            "layers": role.layers,
            "ran_layers": list(role.ran_layers),
            "ran_micro_batches": role.ran_micro_batches,
            "extrapolated": role.extrapolated,
            "saved_bytes": role.saved_bytes,
            "optimizer": role.optimizer,
            "wall_seconds": role.wall_seconds,
            "cpu_seconds": role.cpu_seconds,
            "resident_bytes": role.resident_bytes,
        }


def rehearse(
    resolved: Resolved,
    ranks: str = "roles",
    steps: int = 2,
    progress: Progress = lambda *_: None,
    *,
    every_layer: bool = False,
) -> Rehearsal:
    """Rehearse ranks of the chosen plan; raises `BadInput`, `NotRehearsable` or `RankFailed`.

    `every_layer`: run all layers and micro-batches, also where fewer give the same figures.
    """
    option = resolved.decision.chosen or (resolved.decision.ranked or [resolved.chosen])[0]
    refuse_unfakeable(resolved.recipe, option.plan)
    chosen = choose_ranks(option.plan, ranks)
    spec = replace(spec_of(resolved, option.plan, steps), every_layer=every_layer)
    began = time.perf_counter()
    reports = _run(spec, chosen, option.plan, progress)
    several = resolved.job.cluster.devices > 1
    on_cpu = spec.backend == "cpu"
    return Rehearsal(
        option=option,
        roles=tuple(reports),
        mismatches=tuple(mismatches(reports)),
        context_bytes=0 if on_cpu else round(CALIBRATION.context_bytes + several * CALIBRATION.collective_bytes),
        margin=0.0 if on_cpu else CALIBRATION.fragmentation,
        seconds=time.perf_counter() - began,
        steps=steps,
        predicted_traffic=traffic_bytes(of_plan(option.plan, resolved.job)),
    )


def axis_of(kind: str, ranks: Sequence[int], plan: Plan) -> str:
    """The axis of a plan that a collective is over."""
    inside = plan.tp * plan.token_parts
    if kind in ("send", "recv"):
        return "pp" if plan.pp > 1 else "cp"
    if "alltoall" in kind:
        is_inside = len({rank // inside for rank in ranks}) == 1
        return "sp" if plan.sp > 1 and is_inside else "ep" if plan.ep > 1 else "other"
    if plan.tp > 1 and len(ranks) <= plan.tp and len({rank // inside for rank in ranks}) == 1:
        return "tp"
    return "dp" if len({rank // (plan.dp * inside) for rank in ranks}) == 1 else "other"


def choose_ranks(plan: Plan, text: str) -> list[int]:
    """Ranks of `roles`, `all` or a list.

    `roles`: the first rank of every stage; of the first two stages and the last one also the last tensor and data rank.
    """
    if text == "all":
        return list(range(plan.devices))
    if text == "roles":
        inner = plan.tp * plan.token_parts
        stage_size = plan.dp * inner
        places = [0, inner - 1, (plan.dp - 1) * inner]
        # The stages between the second and the last run the code of the second; only their first ranks are rehearsed.
        found = [
            s * stage_size + p for s in range(plan.pp) for p in (places if s in (0, 1, plan.pp - 1) else places[:1])
        ]
        return sorted({*found, *([plan.devices - 1] if plan.islands > 1 else [])})
    words = text.split(",")
    if not all(word.strip().isdigit() for word in words):
        raise BadInput("--ranks", f"{text!r} given; roles, all or ranks such as 0,8 are required")
    ranks = sorted({int(word) for word in words})
    if ranks[-1] >= plan.devices:
        raise BadInput("--ranks", f"rank {ranks[-1]} given; the plan has ranks 0 to {plan.devices - 1}")
    return ranks


def refuse_unfakeable(recipe: Recipe, plan: Plan) -> None:
    """Raise `NotRehearsable` for what has no fake: the message names it."""
    outer = recipe.train.outer
    unfakeable = {
        "NVMe offload (strategy.offload)": plan.offload.startswith("nvme"),
        f"the CUDA operator of {recipe.model.attention} (model.attention)": recipe.model.attention
        in ("flash_attention_2", "flash_attention_3", "flex"),
        "Liger's Triton kernels (model.kernels)": recipe.model.kernels == "liger",
        "the code of torch.compile (model.compile)": recipe.model.compile == "layers",
        "ZeRO++'s quantisation kernels (strategy.zero_quantized)": plan.zero_quantized != "none",
        "the exchange of asynchronous islands (train.outer.mode)": outer is not None and outer.mode == "async",
        "a model's own code (model.trust_remote_code)": recipe.model.trust_remote_code,
        "several chunks per rank of an encoder-decoder": recipe.model.task == "seq2seq" and plan.chunks > 1,
        "a live teacher (train.distill.predictions)": recipe.train.has_live_teacher,
    }
    for name, is_used in unfakeable.items():
        if is_used:
            raise NotRehearsable(f"{name} can't be rehearsed: it has no stand-in on fake tensors")


def spec_of(resolved: Resolved, plan: Plan, steps: int = 2) -> RehearsalSpec:
    """What a rank of a plan is rehearsed from."""
    recipe, cluster = resolved.recipe, resolved.job.cluster
    texts = texts_per_sample(recipe.data, recipe.train.objective)
    return RehearsalSpec(
        model=replace(recipe.model, config=dict(raw_config(recipe.model)), path=None, init="scratch"),
        train=recipe.train,
        plan=plan,
        deepspeed=resolved.deepspeed,
        backend=cluster.device.backend,
        device_name=cluster.device.name,
        device_memory_bytes=cluster.device.memory_bytes,
        local_size=cluster.devices_per_node,
        seq_len=resolved.job.workload.seq_len // texts,
        texts=texts,
        rows="pairs" if resolved.job.workload.shared_prompt else _rows(recipe),
        steps=steps,
    )


def _rows(recipe: Recipe) -> str:
    """What a row of the run's batches holds."""
    data, task = recipe.data, recipe.model.task
    special = {"image-classification": "image", "classification": "text", "embedding": "text", "seq2seq": "seq2seq"}
    if task in special or data.path == "synthetic":
        return special.get(task or "", "plain")
    if not data.packing:
        return "padded"
    return "plain" if data.packing_method == "stream" else "packed"


def _run(spec: RehearsalSpec, ranks: Sequence[int], plan: Plan, progress: Progress) -> list[RoleReport]:
    """Rehearse in one process per rank, forked from a server that has imported everything."""
    per_stage = plan.devices // plan.pp
    stages = [[rank for rank in ranks if rank // per_stage == stage] for stage in range(plan.pp)]
    if plan.pp > 1:  # a stage needs the shapes that the stage before it sends
        last = max(index for index, own in enumerate(stages) if own)
        stages = [own or [index * per_stage] for index, own in enumerate(stages) if own or index < last]
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as directory:
        source, target, log = Path(directory) / "in", Path(directory) / "out", Path(directory) / "log"
        target.mkdir()
        passing = tuple(rank for own in stages for rank in own if rank not in ranks)
        source.write_bytes(pickle.dumps((replace(spec, only_shapes=passing), stages, plan.devices)))
        process = _start(spec.backend, [str(source), str(target), str(log)])
        try:
            _follow(process, target, progress)
        finally:
            process.kill()
            process.wait()
        found = [pickle.loads(p.read_bytes()) for p in target.iterdir() if not p.suffix]  # noqa: S301 - our own files
        failed = [one for one in found if isinstance(one, RoleFailed)]
        if failed or not found:
            _raise(failed, log.read_text(encoding="utf-8", errors="replace") if log.exists() else "")
    return sorted((one for one in found if one.rank in ranks), key=lambda one: one.rank)


def _start(backend: str, files: Sequence[str]) -> Process:
    """Start the process that rehearses: a warm one if the plan's device is a CPU, as the fake device is not needed."""
    if backend == "cpu":
        return WarmProcess.start(Command(argv=(WORKER, *files)), _enter)
    env = environment({**import_path(), "DS_ACCELERATOR": "cuda"})
    return subprocess.Popen([sys.executable, "-P", "-m", WORKER, *files], env=env)


def _enter(argv: tuple[str, ...], env: dict[str, str]) -> None:
    """Entry of a warm process."""
    sys.exit(importlib.import_module(argv[0]).main(list(argv[1:])))


def _follow(process: Process, target: Path, progress: Progress) -> None:
    """Report how many runs are done, and the seconds left, until the process ends."""
    began, shown = time.perf_counter(), 0
    note = target / "progress.txt"
    running = True
    while running:
        running = process.poll() is None  # before the note is read: what was written last is shown, too
        words = note.read_text().split() if note.exists() else []
        if len(words) == 2 and int(words[0]) != shown:
            shown, total = map(int, words)
            progress(shown, total, (time.perf_counter() - began) / shown * (total - shown))
        if running:
            time.sleep(POLL_SECONDS)


def _raise(failed: Sequence[RoleFailed], log: str) -> None:
    if not failed:
        raise RankFailed(f"the rehearsal ended without a report:\n{log[-2000:]}")
    first = min(failed, key=lambda one: one.rank)
    if first.refused:
        raise NotRehearsable(f"rank {first.rank} can't be rehearsed: {first.reason}")
    raise RankFailed(f"rank {first.rank} fails in rehearsal: {first.reason}\n{first.details}")


def mismatches(reports: Sequence[RoleReport]) -> list[Mismatch]:
    """The first difference of every two ranks that would wait for each other: in a group, or between stages."""
    by_group: dict[tuple[int, ...], dict[int, list[Collective]]] = {}
    transfers: dict[tuple[int, int], dict[str, list[Collective]]] = {}
    rehearsed = [report.rank for report in reports]
    for report in reports:
        for one in (one for phase in report.phases for one in phase.collectives):
            if one.kind in ("send", "recv"):
                assert one.peer is not None
                ends = (report.rank, one.peer) if one.kind == "send" else (one.peer, report.rank)
                transfers.setdefault(ends, {"send": [], "recv": []})[one.kind].append(one)
            else:
                by_group.setdefault(one.ranks, {}).setdefault(report.rank, []).append(one)
    found: list[Mismatch | None] = []
    for group, calls in by_group.items():
        members = sorted(set(group).intersection(rehearsed))
        for rank in members[1:]:
            ends = (members[0], rank)
            found.append(_difference(group, ends, calls.get(members[0], []), calls.get(rank, []), _look))
    for ends, kinds in transfers.items():
        if set(ends) <= set(rehearsed):
            found.append(_difference(ends, ends, kinds["send"], kinds["recv"], lambda one: (one.dtype, one.numel)))
    return [mismatch for mismatch in found if mismatch is not None]


def _look(one: Collective) -> tuple[Any, ...]:
    """What must be equal on all ranks; all run the same code, so the call site, too.

    Of a broadcast or reduction to one rank only the files: its root may call it on another line than the others. Not
    the size where ranks send different parts of matrices to each other, as Muon does.
    """
    rooted = one.kind in ("broadcast", "reduce", "gather", "scatter")
    site = re.sub(r":\d+", "", one.site) if rooted else one.site
    size = None if "/whole_matrices.py" in one.site else one.numel
    return one.kind, one.dtype, size, one.peer, site


def _difference(
    group: tuple[int, ...],
    ends: tuple[int, int],
    left: Sequence[Collective],
    right: Sequence[Collective],
    look: Callable[[Collective], tuple[Any, ...]],
) -> Mismatch | None:
    for number in range(max(len(left), len(right))):
        pair = [side[number] if number < len(side) else None for side in (left, right)]
        if None in pair or look(pair[0]) != look(pair[1]):  # type: ignore[arg-type]
            said = "; ".join(f"rank {rank}: {_describe(one)}" for rank, one in zip(ends, pair, strict=True))
            return Mismatch(group, ends, f"call {number + 1}: {said}")
    return None


def _describe(one: Collective | None) -> str:
    if one is None:
        return "no further call"
    return f"{one.kind} of {one.numel:,} {one.dtype} at {one.site}"


def verdict(rehearsal: Rehearsal) -> str:
    """One line: whether it fits, with what was added to the live bytes."""
    fullest = max(rehearsal.roles, key=rehearsal.needed_bytes)
    limit = rehearsal.option.estimate.memory_limit_bytes
    return (
        f"{'fits' if rehearsal.fits else 'does not fit'}: rank {fullest.rank} needs "
        f"{rehearsal.needed_bytes(fullest) / GIB:.1f} of {limit / GIB:.1f} GiB "
        f"({fullest.device_peak_bytes / GIB:.1f} live + {rehearsal.context_bytes / GIB:.1f} context and communication "
        f"+ {rehearsal.margin:.0%} margin)"
    )
