"""Bad input: one clear message, exit code 2 or 3, no traceback, nothing started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import bad_inputs
from toolkit.cli import main


@pytest.fixture
def recipe(recipe_mapping: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**recipe_mapping, "output": str(tmp_path / "runs")}))
    return path


def failing(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(list(argv))
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert len(shown.err.strip()) > 20
    return code, shown.err


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("model={path: no/such-model-anywhere}", 2, "no/such-model-anywhere"),
        ("model.config={model_type: lama}", 2, "llama"),
        ("model.config={hidden_size: 32}", 2, "model_type"),
        ("model.config.hidden_size=wide", 2, "hidden_size"),
        ("model.config.output_router_logits=true", 2, "router losses"),
        ("data.seq_len=128", 2, "128 tokens given; the model takes at most 64"),
        ("data.path=/no/such/file.txt", 2, "no such file"),
        ("data.format=chats", 2, "did you mean chat?"),
        ("data.path={a.txt: -1}", 2, "a weight above 0"),
        ("model.lora={rank: 4, quantize: 4bit}", 2, "4bit needs pretrained weights"),
        ("strategy.name=zerro", 2, "zerro"),
        ("train.outer={delay_steps: 2}", 2, "unused with mode wait"),
        (
            "strategy={name: zero, zero_stage: 2, offload: cpu_params}",
            3,
            "parameters can be offloaded under ZeRO 3 only",
        ),
        ("strategy={name: zero, zero_variant: mics}", 3, "MiCS was removed in DeepSpeed 0.19.7"),
        ("strategy={name: zero, zero_variant: hpz}", 3, "hpZ needs a zero_group above 1 and below dp"),
        ("strategy={name: zero, zero_quantized: both, zero_stage: 3}", 3, "CUDA"),
        ("strategy.tp=3", 2, "does not divide the 2 devices"),
        ("strategy={name: data_parallel, tp: 2}", 3, "strategy.tp is fixed at 2; data_parallel offers 1"),
        ("strategy={micro_batch: 3}", 3, "does not make the global batch 8"),
        ("model.precision=fp16", 3, "no fp16 on CPU"),
        ("train.optimizer=onebit_lamb", 2, "removed in 0.19.7"),
        ("train.reduce.algorithm=ring", 2, "train.reduce.algorithm ring and tree are NCCL algorithms"),
        ("train.reduce.algorithm=hierarchical", 2, "needs several hosts"),
        ("train.reduce.overlap=true", 2, "needs device streams"),
        ("train.batch_ramp={start: 3, stage_steps: 1}", 2, "doubling must lead to global_batch 8; use 4 or 2 or 1"),
        ("cluster=no-such-cluster", 2, "no-such-cluster"),
        ("cluster={device: H100}", 2, "H100-SXM5-80GB"),
        ("cluster={device: H100-SXM5-80GB, inter_gbps_per_device: 0}", 2, "more than 0"),
        ("train.steps=[1]", 2, "train.steps"),
    ],
)
def test_problems_of_the_recipe(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    override: str, code: int, words: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    got, message = failing(capsys, "train", str(recipe), override, "--nproc", "2")
    assert words in message
    assert got == code
    assert not (tmp_path / "runs").exists(), "something was started"


LLAMA = ("plan", "demo", "model={path: llama-3-8b}", "data={seq_len: 2048}")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("train.global_batch=1000000000000000000",), "at most 2,147,483,648 is allowed"),
        (("cluster={device: L40S, nodes: 1000000000000000000000000000000}",), "at most 1,048,576 is allowed"),
        (("cluster={device: L40S, nodes: 1e30}",), "nodes: '1e30' given; a whole number is required"),
        (("cluster={device: L40S, nodes: 1000000, devices_per_node: 1000}",), "1,000,000,000 devices given; at most"),
        (("cluster={device: L40S, matmul_tflops: 1.0e+300}",), "at most 1e+06 is allowed"),
        (("cluster={device: L40S, memory_gib: 1.0e-9}",), "at least 0.001 is required"),
        (("cluster={device: L40S, memory_margin: 0.9}",), "memory_margin: 0.9 given; at most 0.5 is allowed"),
        (("cluster=dgx-h100", "--top", "0"), "at least 1 is required"),
        (("cluster=dgx-h100", "--top", "-1"), "at least 1 is required"),
        (("cluster=dgx-h100", "--html", "/no/such/directory/page.html"), "can't be written: no such directory"),
        (("cluster=dgx-h100", "--html", "/"), "can't be written: is a directory"),
        (("cluster=dgx-h100", "--html", "/dev/full"), "can't be written: no space left"),
        (("model={path: /dev/zero}",), "a device or a pipe"),
    ],
)
def test_bad_inputs_of_plan_end_at_once(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str) -> None:
    started = time.process_time()
    try:
        code, message = failing(capsys, *LLAMA, *argv)
    except SystemExit as parser:  # argparse ends by itself
        code, message = int(parser.code or 0), capsys.readouterr().err
    assert code == 2
    assert words in message
    assert time.process_time() - started < 1


@pytest.mark.parametrize("devices", ["1..1000000000000000", "0..8", ",".join(str(n) for n in range(1, 100)), "9e99"])
def test_curves_of_too_many_devices_are_refused(capsys: pytest.CaptureFixture[str], devices: str) -> None:
    code, message = failing(capsys, "scale", "demo", "cluster=dgx-h100", "--devices", devices)
    assert code == 2
    assert "--devices" in message


@pytest.mark.parametrize("batch", [735134400, 2**31, 1999999973])
def test_any_batch_is_planned_within_a_second(capsys: pytest.CaptureFixture[str], batch: int) -> None:
    """735,134,400 has 1,344 divisors; the third is a prime number."""
    started = time.process_time()
    code = main([*LLAMA, "cluster=dgx-h100", f"train.global_batch={batch}"])
    assert code in (0, 3)
    assert time.process_time() - started < 1


def test_a_batch_that_can_not_be_split(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (str(recipe), "strategy.name=zero", "train.global_batch=7", "--nproc", "2")
    code, message = failing(capsys, "train", *argv)
    assert code == 3
    assert "global batch 7 can't be split over 2 data-parallel replicas; use 6 or 8" in message


def test_more_processes_than_devices(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = "cluster={device: A100-SXM4-80GB, devices_per_node: 4}"
    code, message = failing(capsys, "train", str(recipe), cluster, "--nproc", "8")
    assert code == 2
    assert "8 processes given; cluster has 4 devices" in message


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("{device: H100-SXM5-80GB, devices_per_node: 2}", "2 × H100-SXM5-80GB; this host has none"),
        ("{device: cpu, nodes: 2, devices_per_node: 2}", "2 nodes; workers are started on this host only"),
    ],
)
def test_a_cluster_that_is_not_this_host(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: str, words: str
) -> None:
    code, message = failing(capsys, "train", str(recipe), f"cluster={cluster}")
    assert (code, words in message) == (2, True)
    assert not (tmp_path / "runs").exists()


def test_existing_run_directory(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").write_text("x")
    code, message = failing(capsys, "train", str(recipe), "--nproc", "2", "--run-dir", str(tmp_path / "old"))
    assert code == 2
    assert "already exists" in message


def test_empty_and_unreadable_data(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    code, message = failing(capsys, "train", str(recipe), f"data.path={tmp_path / 'empty.txt'}", "--nproc", "2")
    assert (code, "empty" in message) == (2, True)


def test_a_model_too_large_says_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("model={path: llama-3-70b}", "strategy.name=data_parallel", "cluster={device: L4, devices_per_node: 2}")
    code, message = failing(capsys, "plan", "recipes/demo.yaml", *argv)
    assert code == 3
    assert "needs" in message
    assert "GiB" in message


@pytest.mark.slow
def test_data_without_a_sample_ends_every_worker_with_2(recipe: Path, tmp_path: Path) -> None:
    """Only the workers can count tokens; the message is as clear, and the exit code the same."""
    (tmp_path / "short.txt").write_text("short")
    stream = "data.packing_method=stream"
    done = run_cli("train", str(recipe), f"data.path={tmp_path / 'short.txt'}", stream, "--nproc", "2")
    assert done.returncode == 2, done.stderr
    assert "one sequence needs 33" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_wandb_online_without_a_key_falls_back_to_offline_and_reports_it(recipe: Path, tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "WANDB_API_KEY"} | {"HOME": str(tmp_path)}
    done = run_cli("train", str(recipe), "metrics.wandb.mode=online", "train.steps=1", "--nproc", "1", env=env)
    assert done.returncode == 0, done.stderr
    assert "recording offline instead" in done.stdout
    assert list(tmp_path.glob("runs/*/wandb/offline-run-*"))


def test_the_old_name_of_a_command_is_an_alias(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for name in ("rendezvous", "mailbox"):
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        shown.append(capsys.readouterr().out)
    assert "--bind" in shown[0]
    assert shown[1] == shown[0], "an alias has the arguments of the command"


def test_dry_run_starts_nothing(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), "--nproc", "2", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for part in ("global_batch: 8", "zero_optimization", "toolkit.worker", "MFU"):
        assert part in shown
    assert not (tmp_path / "runs").exists()


def test_plan_json_follows_the_contract(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(recipe), "--nproc", "2", "--json"]) == 0
    decision = json.loads(capsys.readouterr().out)
    assert decision.keys() == {"chosen", "ranked", "refused", "considered", "notes", "advice"}
    plan = decision["chosen"]
    axes = {"strategy", "dp", "tp", "pp", "sp", "ep", "zero_stage", "zero_group", "offload", "micro_batch", "grad_accum", "recompute", "precision", "islands", "local_steps"}  # noqa: E501  # fmt: skip
    assert axes | {"fits", "memory", "time", "tokens_per_second", "mfu"} <= plan.keys()
    assert {"params", "grads", "optimizer", "activations", "logits", "gathered", "buffers", "overhead", "total"} <= plan["memory"].keys()  # noqa: E501  # fmt: skip
    assert {"compute", "recompute", "tp_comm", "sp_comm", "pp_bubble", "pp_comm", "dp_comm", "optimizer", "fixed", "total"} <= plan["time"].keys()  # noqa: E501  # fmt: skip
    assert plan["micro_batch"] * plan["grad_accum"] * plan["dp"] == 8
    assert decision["considered"] >= len(decision["ranked"])
    assert plan == decision["ranked"][0]


def test_a_fully_fixed_plan_is_estimated_even_if_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = "strategy={name: zero, zero_stage: 1, zero_variant: plain, zero_quantized: none, offload: none, micro_batch: 1, recompute: none}"  # noqa: E501
    argv = ["model={path: llama-3-70b}", "cluster={device: L4, devices_per_node: 8}", fixed, "--json"]
    assert main(["plan", "recipes/demo.yaml", *argv]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"]["fits"] is False
    assert main(["plan", "recipes/demo.yaml", *argv[:-1]]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "this plan does not fit" in shown
    assert "can run" not in shown
    assert "refused zero" in shown


@pytest.mark.parametrize(
    "argv", [["--help"], ["train", "--help"], ["strategies"], ["keys"], ["strategies", "--devices"], ["--version"]]
)
def test_help_and_lists(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if argv[-1].startswith("--") and argv[-1] != "--devices":
        with pytest.raises(SystemExit, match="0"):
            main(argv)
    else:
        assert main(argv) == 0
    assert len(capsys.readouterr().out) > 10


def run_cli(*argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolkit.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


TABLE = list(bad_inputs.inputs())
SHARE = 10
"""Every tenth input of the table is run here; `python -m benchmarks.bad_inputs` runs all of them."""


def test_the_table_of_bad_inputs_is_long() -> None:
    assert len(TABLE) >= 400
    assert len({(bad.argv, *bad.files.values()) for bad in TABLE}) == len(TABLE)


@pytest.mark.parametrize("bad", TABLE[::SHARE], ids=[" ".join(bad.argv)[:60] for bad in TABLE[::SHARE]])
def test_bad_inputs_of_the_table(bad: bad_inputs.BadInput, tmp_path: Path) -> None:
    assert bad_inputs.problem_of(bad, tmp_path) == ""


def test_a_bad_input_as_a_process(tmp_path: Path) -> None:
    bad = next(bad for bad in TABLE if bad.argv[:1] == ("report",) and bad.files)
    assert bad_inputs.problem_of(bad, tmp_path, process=True) == ""
