"""Rehearses several plans for GPUs from one process: importing everything takes longer than a tiny rehearsal."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.launching.environment import environment
from toolkit.recipe.file import make_recipe
from toolkit.runtime.rehearsal.report import RoleFailed, RoleReport
from toolkit.sessions.rehearse import spec_of
from toolkit.sessions.resolve import resolve


def rehearse_all(
    mapping: dict[str, Any], plans: Mapping[str, Sequence[str]], directory: Path, steps: int
) -> dict[str, list[RoleReport]]:
    """The first rank of every stage of every plan, given as overrides of a recipe."""
    files: list[str] = []
    for name, overrides in plans.items():
        resolved = resolve(make_recipe(mapping, overrides))
        plan = resolved.chosen.plan
        per_stage = plan.devices // plan.pp
        stages = [[first] for first in range(0, plan.devices, per_stage)]
        own = directory / name
        (own / "out").mkdir(parents=True)
        (own / "in").write_bytes(pickle.dumps((spec_of(resolved, plan, steps), stages, plan.devices)))
        files += [str(own / part) for part in ("in", "out", "log")]
    env = environment({"DS_ACCELERATOR": "cuda"})
    subprocess.run([sys.executable, "-P", __file__, *files], env=env, check=True)
    return {name: _reports(directory / name) for name in plans}


def _reports(directory: Path) -> list[RoleReport]:
    found = [pickle.loads(path.read_bytes()) for path in (directory / "out").iterdir() if not path.suffix]  # noqa: S301
    failed = [f"{one.reason}\n{one.details}" for one in found if isinstance(one, RoleFailed)]
    assert found, (directory / "log").read_text()
    assert not failed, failed[0]
    return sorted(found, key=lambda one: int(one.rank))


def main(argv: Sequence[str]) -> int:
    """Rehearse each (IN, OUT, LOG) in a process of its own."""
    from toolkit.runtime.rehearsal import server, stand_ins

    stand_ins.import_all()
    for first in range(0, len(argv), 3):
        child = os.fork()
        if child == 0:
            os._exit(server.main(list(argv[first : first + 3])))
        os.waitpid(child, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
