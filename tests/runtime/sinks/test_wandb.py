"""W&B offline: every value read back from its file, one run over resumes, no secrets."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import self_killing
from tests.conftest import Finished, Trainer
from toolkit.runtime.sinks import wandb_sink
from toolkit.runtime.sinks.wandb_sink import flat
from toolkit.runtime.supervision.warm_pool import enter_worker
from toolkit.secrets import HIDDEN, redact, redact_text, secrets_in

pytestmark = pytest.mark.slow

ENV_SECRET = "correct-horse-battery-staple"  # noqa: S105
RECIPE_SECRET = "kept-in-a-vault-until-now"  # noqa: S105
WANDB = ("metrics.wandb={mode: offline, project: tests, group: nightly, tags: [a, b]}", "metrics.detail_every=2")


def files(done: Finished) -> list[Path]:
    """All of W&B's files, whatever their ids."""
    return sorted(done.run.path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def config(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in wandb_sink.records(path):
        if record.WhichOneof("record_type") == "run":
            found |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return found


def of_kind(path: Path, kind: str) -> list[Any]:
    return [getattr(r, kind) for r in wandb_sink.records(path) if r.WhichOneof("record_type") == kind]


def same(logged: Any, recorded: Any) -> bool:
    if isinstance(recorded, float) and not math.isfinite(recorded):
        return str(logged) in (str(recorded), {"nan": "NaN", "inf": "Infinity"}.get(str(recorded), ""))
    return bool(logged == recorded)


def check_equal(done: Finished) -> None:
    """All files together hold exactly what metrics.jsonl holds, once."""
    logged = [point for path in files(done) for point in wandb_sink.history(path)]
    expected = [flat(record) for record in done.records]
    assert [point["_step"] for point in logged] == [record["step"] for record in expected]
    for point, record in zip(logged, expected, strict=True):
        assert {key for key in point if not key.startswith("_")} == record.keys()
        for key, value in record.items():
            assert same(point[key], value), key


def test_every_value_is_read_back_and_no_secret_is_there(train: Trainer) -> None:
    planted = (
        f"model.config.note={ENV_SECRET}",
        f"model.config.api_key={RECIPE_SECRET}",
        "model.config.mirror=https://pa55word@mirror.example/models",
    )

    axes = ("train.steps=5", "strategy.name=zero", "strategy.zero_stage=1")
    done = train(*WANDB, *planted, *axes, enter=enter_with_secret)
    check_equal(done)
    (path,) = files(done)
    told, run = config(path), of_kind(path, "run")[0]
    assert told["plan"]["strategy"] == "zero"
    assert told["recipe"]["train"]["steps"] == 5
    assert told["predicted"]["parts"]["compute"] > 0
    assert told["environment"]["versions"]["deepspeed"]
    assert told["recipe"]["model"]["config"]["api_key"] == HIDDEN
    assert (run.run_group, list(run.tags), run.project) == ("nightly", ["a", "b"], "tests")
    (report,) = of_kind(path, "artifact")
    assert (report.type, [entry.path for entry in report.manifest.contents]) == ("report", ["report.html"])
    for file in [*done.run.path.glob("wandb/**/*"), done.run.path / "report.html"]:
        if file.is_file():
            for secret in (ENV_SECRET, RECIPE_SECRET, "pa55word"):
                assert secret.encode() not in file.read_bytes(), f"{secret} in {file}"


def enter_with_secret(argv: tuple[str, ...], env: dict[str, str]) -> None:
    os.environ["MY_SERVICE_TOKEN"] = ENV_SECRET
    enter_worker(argv, env)


def test_three_resumes_are_one_run_without_doubled_points(train: Trainer, tmp_path: Path) -> None:
    """Killed in the middle of a step, twice, and asked to resume after the end: each time from a checkpoint."""
    axes = (*WANDB, "checkpoint.every=3")
    run = tmp_path / "run"
    for _ in range(2):
        killed = train(*axes, "train.steps=12", nproc=1, into=run, enter=die_after_five, check=False)
        assert any(killed.codes)
    train(*axes, "train.steps=12", nproc=1, into=run)
    done = train(*axes, "train.steps=14", nproc=1, into=run)
    assert [record["step"] for record in done.records] == list(range(1, 15))
    assert len(files(done)) == 4
    own = (run / "wandb-id").read_text()
    assert {path.name for path in files(done)} == {f"run-{own}.wandb"}
    assert {one.run_id for path in files(done) for one in of_kind(path, "run")} == {own}
    check_equal(done)


def die_after_five(argv: tuple[str, ...], env: dict[str, str]) -> None:
    if env["RANK"] == "0":
        self_killing.die_in_step(5.0)
    enter_worker(argv, env)


def evaluations_in_wandb(done: Finished) -> list[dict[str, Any]]:
    points = [point for path in files(done) for point in wandb_sink.history(path)]
    found = [
        {k.removeprefix("eval/"): v for k, v in p.items() if k.startswith("eval/")} | {"step": p["_step"]}
        for p in points
    ]
    return [one for one in found if "loss" in one]


@pytest.mark.parametrize("every", [0, 3], ids=["sent at once", "sent when a checkpoint covers them"])
def test_evaluations_reach_wandb(train: Trainer, every: int) -> None:
    """The sink is wrapped, and the file is the real one: what eval.jsonl holds is in it, at its step."""
    held_out = ("data.eval_fraction=0.2", "train.eval_every=2", "train.steps=5", f"checkpoint.every={every}")
    done = train(*WANDB, *held_out, nproc=1)
    expected = [json.loads(line) for line in done.run.evaluations.read_text().splitlines()]
    assert [line["step"] for line in expected] == [2, 4, 5]
    assert evaluations_in_wandb(done) == expected


def test_secrets_are_hidden_by_name_form_and_value() -> None:
    given = {
        "api_key": "abc", "pad_token_id": 3, "tokens": "1,000", "tokenizer": "bytes", "hfToken": "x",
        "list": ["see https://u:p@host/x", "key sk-abcdefghijklmnopqrst"], "plain": "my horse is safe",
    }  # fmt: skip
    assert redact(given, ["horse"]) == {
        "api_key": HIDDEN, "pad_token_id": 3, "tokens": "1,000", "tokenizer": "bytes", "hfToken": HIDDEN,
        "list": [f"see https://{HIDDEN}@host/x", f"key {HIDDEN}"], "plain": f"my {HIDDEN} is safe",
    }  # fmt: skip
    assert secrets_in({"WANDB_API_KEY": "0123456789", "PATH": "/usr/bin", "AUTH": "on"}) == {"0123456789"}
    assert redact_text("0" * 40) == HIDDEN
