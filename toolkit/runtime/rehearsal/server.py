"""Rehearses ranks: one forked process each, two at a time.

    python -m toolkit.runtime.rehearsal.server IN OUT LOG     with DS_ACCELERATOR set, by `toolkit.sessions.rehearse`

Imports are paid once; pipeline stages run in order, because shapes travel from stage to stage.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from toolkit.errors import ToolkitError, first_line
from toolkit.runtime.rehearsal import stand_ins
from toolkit.runtime.rehearsal.rank import rehearse_rank
from toolkit.runtime.rehearsal.reads import UnknownRead
from toolkit.runtime.rehearsal.reduced import (
    Bounds,
    extrapolated,
    further_micro_batches,
    lengths,
    reduced,
    stage_layers,
)
from toolkit.runtime.rehearsal.report import RehearsalSpec, RoleFailed, RoleReport
from toolkit.runtime.rehearsal.stand_ins import Shapes
from toolkit.runtime.rehearsal.watch import kinds_of_layers

AT_A_TIME = 2
"""Ranks that run at the same time."""
POLL_SECONDS = 0.02


def main(argv: list[str]) -> int:
    """Read (spec, ranks by stage, world size) and write one report per rank, as pickles; output goes to a log."""
    warnings.filterwarnings("ignore")
    source, target, log = map(Path, argv)
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    spec, stages, world = pickle.loads(source.read_bytes())  # noqa: S301 - written by our own parent
    stand_ins.prepare(spec)
    trials = _in_child(stand_ins.make_trials, spec.model, target / "trials.run")
    stand_ins.remember(trials)
    spec = replace(spec, trials=trials)
    kinds = kinds_of_layers(spec.model)
    short = lengths(spec, kinds)
    wanted = [[rank for rank in ranks if rank not in spec.only_shapes] for ranks in stages]
    alike = len(set(kinds)) == 1
    if alike:  # all boundaries have the shapes of the first
        stages = [ranks if number == 0 else own for number, (ranks, own) in enumerate(zip(stages, wanted, strict=True))]
    passing = sum(map(len, stages)) - sum(map(len, wanted))
    server = _Server(target, world, sum(map(len, wanted)) * max(1, len(short)) + passing, alike)
    whole = stage_layers(spec, len(kinds))
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage often; what was imported is none
    runs = server.run([reduced(spec, len(kinds), length) for length in short], stages)
    reports: list[Any] = []
    for ranks in runs:
        failed = next((one for one in ranks if isinstance(one, RoleFailed)), None)
        reports.append(failed or extrapolated(ranks, whole[ranks[0].stage], Bounds.of(spec, kinds)))
    if not reports or None in reports:
        server.total += sum(map(len, stages)) * bool(reports)
        reports = [one for (one,) in server.run([reduced(spec, len(kinds), None)], stages)]
    for report in reports:
        _write(target / str(report.rank), _complete(report, spec))
    return 0


def _in_child(work: Callable[[Any], Any], given: Any, path: Path) -> Any:
    """The result of work in a forked process of its own: autograd's threads do not survive a fork."""
    child = os.fork()
    if child == 0:
        _write(path, work(given))
        os._exit(0)
    os.waitpid(child, 0)
    result = pickle.loads(path.read_bytes())  # noqa: S301 - written by our own child
    path.unlink()
    return result


def _complete(report: Any, spec: RehearsalSpec) -> Any:
    if isinstance(report, RoleFailed):
        return report
    return further_micro_batches(report, spec.plan.grad_accum - report.ran_micro_batches)


@dataclass(frozen=True)
class _Task:
    """One run of a rank."""

    stage: int
    rank: int
    number: int
    """Which of the specs."""


class _Server:
    """Forks a process per run, two at a time; a stage starts when the stage before it has sent its shapes."""

    def __init__(self, target: Path, world: int, total: int, alike: bool) -> None:
        """`alike`: whether all boundaries between stages have the same shapes, because all layers are alike."""
        self._target, self._world, self._alike, self._done = target, world, alike, 0
        self.total = total
        """Runs that are expected."""

    def run(self, specs: Sequence[RehearsalSpec], stages: list[list[int]]) -> list[list[Any]]:
        """For every rank the reports of all specs; after a failure, of the ranks until then."""
        passing = specs[0].only_shapes if specs else ()
        waiting = [
            _Task(stage, rank, number)
            for stage, ranks in enumerate(stages)
            for rank in ranks
            for number in reversed(range(1 if rank in passing else len(specs)))
        ]
        reports: dict[_Task, Any] = {}
        running: dict[int, _Task] = {}
        while waiting or running:
            if waiting and len(running) < AT_A_TIME and self._has_shapes(waiting[0].stage, reports):
                task = waiting.pop(0)
                running[self._fork(specs[task.number], task)] = task
                continue
            child, _ = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                time.sleep(POLL_SECONDS)
                continue
            task = running.pop(child)
            reports[task] = self._report(task)
            if isinstance(reports[task], RoleFailed):
                waiting.clear()
        return _by_rank(reports, passing, len(specs))

    def _sender(self, stage: int) -> int:
        """The stage whose shapes a stage receives."""
        return 0 if self._alike else stage - 1

    def _has_shapes(self, stage: int, reports: dict[_Task, Any]) -> bool:
        """Whether a stage can start; one that has ended without shapes sends none."""
        sender = self._sender(stage)
        return stage == 0 or self._shapes(sender).exists() or any(task.stage == sender for task in reports)

    def _fork(self, spec: RehearsalSpec, task: _Task) -> int:
        before = self._shapes(self._sender(task.stage))
        known = task.stage > 0 and before.exists()
        heard = pickle.loads(before.read_bytes()) if known else []  # noqa: S301 - written by our own child
        child = os.fork()
        if child == 0:
            shapes = Shapes(heard, lambda own: self._tell(spec, task, own))
            _child(spec, task, self._world, shapes, self._path(task))
        return child

    def _tell(self, spec: RehearsalSpec, task: _Task, shapes: list[Any]) -> None:
        """In a rank's process: hand its shapes to the next stage. A rank that only passes them on ends here."""
        _write(self._shapes(task.stage), shapes)
        if task.rank in spec.only_shapes:
            _write(self._path(task), None)
            os._exit(0)

    def _shapes(self, stage: int) -> Path:
        """What a stage sends to the next one."""
        return self._target / f"{stage}.shapes"

    def _path(self, task: _Task) -> Path:
        return self._target / f"{task.rank}-{task.number}.run"

    def _report(self, task: _Task) -> Any:
        path = self._path(task)
        if not path.exists():
            _write(path, RoleFailed(task.rank, "the process ended without a report", False))
        report = pickle.loads(path.read_bytes())  # noqa: S301 - written by our own child
        path.unlink()
        self._done += 1
        (self._target / "progress.txt").write_text(f"{self._done} {self.total}")
        return report


def _by_rank(reports: dict[_Task, Any], passing: Sequence[int], num_specs: int) -> list[list[Any]]:
    """Reports of each rank in the order of the specs, of ranks with all of them; and failures."""
    found: dict[int, list[Any]] = {}
    for task in sorted(reports, key=lambda task: (task.rank, task.number)):
        if task.rank not in passing:
            found.setdefault(task.rank, []).append(reports[task])
    failed = [[one] for one in reports.values() if isinstance(one, RoleFailed)]
    return failed or [own for own in found.values() if len(own) == num_specs]


def _child(spec: RehearsalSpec, task: _Task, world: int, shapes: Shapes, path: Path) -> None:
    rank = task.rank
    torch.set_num_threads(1)
    # DeepSpeed 0.19.8 refuses to start without these, though the process group exists already.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
    report: RoleReport | RoleFailed
    try:
        report = rehearse_rank(spec, rank, world, shapes)
    except (UnsupportedOperatorException, DataDependentOutputException, DynamicOutputShapeException) as error:
        report = RoleFailed(rank, f"the operator {error.func} can't run on fake tensors", True, traceback.format_exc())
    except UnknownRead as error:
        report = RoleFailed(rank, f"{error}: it has no known answer on fake tensors", True, traceback.format_exc())
    except Exception as error:
        reason = (
            first_line(error) if isinstance(error, ToolkitError) else f"{type(error).__name__}: {first_line(error)}"
        )
        report = RoleFailed(rank, reason, False, traceback.format_exc())
    _write(path, report)
    sys.stdout.flush()
    os._exit(0)


def _write(path: Path, report: Any) -> None:
    part = path.with_suffix(f".part{os.getpid()}")
    part.write_bytes(pickle.dumps(report))
    part.rename(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
