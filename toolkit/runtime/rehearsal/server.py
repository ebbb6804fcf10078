"""Rehearses ranks: one forked process each, two at a time.

    python -m toolkit.runtime.rehearsal.server IN OUT LOG     with DS_ACCELERATOR set, by `toolkit.sessions.rehearse`

Imports are paid once; pipeline stages run in order, because shapes travel from stage to stage.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from toolkit.runtime.rehearsal.watch import kinds_of_layers

AT_A_TIME = 2
"""Ranks that run at the same time."""


def main(argv: list[str]) -> int:
    """Read (spec, ranks by stage, world size) and write one report per rank, as pickles; output goes to a log."""
    warnings.filterwarnings("ignore")
    source, target, log = map(Path, argv)
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    spec, stages, world = pickle.loads(source.read_bytes())  # noqa: S301 - written by our own parent
    stand_ins.prepare(spec)
    trials = _in_child(stand_ins.head_trials, spec.model, target / "head.run")
    stand_ins.remember(trials)
    spec = replace(spec, head=trials)
    kinds = kinds_of_layers(spec.model)
    short = lengths(spec, kinds)
    wanted = [[rank for rank in ranks if rank not in spec.only_shapes] for ranks in stages]
    server = _Server(target, world, sum(map(len, wanted)) * max(1, len(short)) + len(spec.only_shapes))
    whole = stage_layers(spec, len(kinds))
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


class _Server:
    """Forks a process per rank, two at a time; stages run in order because shapes travel from stage to stage."""

    def __init__(self, target: Path, world: int, total: int) -> None:
        self._target, self._world, self._done = target, world, 0
        self.total = total
        """Runs that are expected."""

    def run(self, specs: Sequence[RehearsalSpec], stages: list[list[int]]) -> list[list[Any]]:
        """For every rank the reports of all specs; after a failure, of the ranks until then."""
        found: list[list[Any]] = []
        heard: list[Any] = []
        for ranks in stages if specs else []:
            passing = specs[0].only_shapes
            tasks = [
                (rank, number) for rank in ranks for number in reversed(range(1 if rank in passing else len(specs)))
            ]
            reports: dict[tuple[int, int], Any] = {}
            running: dict[int, tuple[int, int]] = {}
            while tasks or running:
                while tasks and len(running) < AT_A_TIME:
                    task = tasks.pop(0)
                    running[self._fork(specs[task[1]], task, heard)] = task
                child, _ = os.wait()
                task = running.pop(child)
                reports[task] = self._report(task)
            own = [rank for rank in ranks if rank not in passing]
            found += [[reports[rank, number] for number in range(len(specs))] for rank in own]
            found += [[one] for one in reports.values() if isinstance(one, RoleFailed) and one.rank in passing]
            if any(isinstance(report, RoleFailed) for report in reports.values()):
                break
            heard = next((report.sent for report in reports.values() if report.sent), [])
        return found

    def _fork(self, spec: RehearsalSpec, task: tuple[int, int], heard: list[Any]) -> int:
        if task[0] in spec.only_shapes:
            spec = replace(spec, steps=1, evaluates=False)
        child = os.fork()
        if child == 0:
            _child(spec, task[0], self._world, heard, self._path(task))
        return child

    def _path(self, task: tuple[int, int]) -> Path:
        return self._target / f"{task[0]}-{task[1]}.run"

    def _report(self, task: tuple[int, int]) -> Any:
        path = self._path(task)
        if not path.exists():
            _write(path, RoleFailed(task[0], "the process ended without a report", False))
        report = pickle.loads(path.read_bytes())  # noqa: S301 - written by our own child
        path.unlink()
        self._done += 1
        (self._target / "progress.txt").write_text(f"{self._done} {self.total}")
        return report


def _child(spec: RehearsalSpec, rank: int, world: int, heard: list[Any], path: Path) -> None:
    torch.set_num_threads(1)
    # DeepSpeed 0.19.8 refuses to start without these, though the process group exists already.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
    report: RoleReport | RoleFailed
    try:
        report = rehearse_rank(spec, rank, world, heard)
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
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(report))
    part.rename(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
