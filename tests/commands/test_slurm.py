"""An emitted sbatch script on a real Slurm: it trains, is preempted, requeued, resumes and completes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.helpers import launching_page
from tests.helpers.slurm import Slurm, why_not
from toolkit.recipe.file import dump_recipe, make_recipe
from toolkit.run_dir import heartbeat

reason = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(reason), reason=reason)]


def test_a_job_is_preempted_queued_again_and_completes(tmp_path: Path, launch_reference: list[float]) -> None:
    overrides = [f"train.steps={launching_page.STEPS}", "checkpoint.every=100000"]
    (tmp_path / "recipe.yaml").write_text(dump_recipe(make_recipe(launching_page.RECIPE, overrides)))
    out = tmp_path / "slurm-job"
    with Slurm(tmp_path / "slurm") as slurm:
        page = launching_page.environment()
        env = {**page, **slurm.env, "PATH": f"{page['PATH']}:{slurm.env['PATH']}"}
        emit, submit = launching_page.commands("Slurm")
        launching_page.run(emit, tmp_path, env)
        number = launching_page.run(submit, tmp_path, env)[1].split()[-1]
        run = out / "runs" / f"job-{number}"
        at_step(slurm, number, run, 3)
        slurm.run("scancel", "--signal=USR1", number)  # as --signal=USR1@120 does before the time limit
        job = slurm.wait(number, "COMPLETED")
    assert job["Restarts"] == "1"
    log = (out / f"tiny-{number}.out").read_text()
    assert "Traceback" not in log, log
    assert launching_page.losses(run / "metrics.jsonl") == launch_reference


def at_step(slurm: Slurm, number: str, run: Path, step: int) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        beats = heartbeat.read_all(run / "heartbeats")
        if len(beats) == 2 and all(beat.step >= step for beat in beats.values()):
            return
        time.sleep(0.05)
    raise AssertionError(f"the job never trained: {slurm.job(number)}")
