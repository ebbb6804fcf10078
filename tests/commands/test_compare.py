"""`toolkit compare`, prices, energy, advice and what `toolkit validate` prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli import main

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
LLAMA = ["demo", "model={path: llama-3-8b}", "data={seq_len: 2048}", "train={global_batch: 128, steps: 100}"]


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(list(argv)) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_best_plan_on_each_cluster_with_cost_and_energy(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "compare", *LLAMA, "--clusters", "dgx-h100,dgx-a100,8xl40s", "--list-prices", "--json")
    fast, old, slow = found["clusters"]
    assert fast["tokens_per_second"] > old["tokens_per_second"] > slow["tokens_per_second"]
    assert found["best"]["speed"] == "dgx-h100"
    hours = 8 * fast["step_seconds"] / 3600
    assert fast["cost"]["run"] == pytest.approx(100 * hours * 2.99)
    assert fast["cost"]["per_billion_tokens"] == pytest.approx(hours * 2.99 / (128 * 2048 / 1e9))
    assert fast["cost"]["run_kwh"] == pytest.approx(100 * hours * 0.7)
    low, high = fast["interval"]
    assert low < fast["step_seconds"] < high


def test_prices_are_off_by_default_and_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = "cluster={device: A100-SXM4-80GB"
    plain = shown(capsys, "plan", *LLAMA, f"{cluster}}}", "--json")["chosen"]["cost"]
    assert plain["per_billion_tokens"] is None
    given = shown(capsys, "plan", *LLAMA, f"{cluster}, price_per_device_hour: 2}}", "--json")["chosen"]["cost"]
    assert given["per_billion_tokens"] > 0
    assert main(["plan", *LLAMA, "cluster={device: Gaudi3, price_per_device_hour: list}"]) == 2
    assert "no list price is known" in capsys.readouterr().err


def test_a_cheaper_cluster_wins_by_cost(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "compare", *LLAMA, "--clusters", "dgx-h100,dgx-b200", "--list-prices", "--json")
    assert found["best"] == {"speed": "dgx-b200", "cost": "dgx-h100", "energy": found["best"]["energy"]}


@pytest.mark.parametrize("clusters", ["", ",", "no-such-cluster", "dgx-h100,/no/such/file.yaml"])
def test_bad_clusters(capsys: pytest.CaptureFixture[str], clusters: str) -> None:
    assert main(["compare", *LLAMA, "--clusters", clusters]) == 2
    assert len(capsys.readouterr().err) > 20


def test_no_cluster_that_fits_is_exit_3(capsys: pytest.CaptureFixture[str]) -> None:
    """With everything on its disks, 8 × L40S would take half an hour per step; without them nothing fits."""
    large = ["demo", "model={path: llama-3.1-405b}", "data={seq_len: 8192}", "train.global_batch=8"]
    assert main(["compare", *large, "strategy.offload=none", "--clusters", "8xl40s"]) == 3
    assert "no plan fits" in capsys.readouterr().err


def advice(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code = main(["plan", *argv, "--json"])
    found = json.loads(capsys.readouterr().out)["advice"]
    assert code in (0, 3)
    return str(found["change"]) if found else ""


def test_lora_of_70b_on_one_device_is_told_to_use_4_bits(capsys: pytest.CaptureFixture[str]) -> None:
    one = [
        "demo",
        "data={seq_len: 2048}",
        "train.global_batch=8",
        "cluster={device: H100-SXM5-80GB, devices_per_node: 1}",
    ]
    assert "4-bit" in advice(capsys, *one, "model={path: llama-3.1-70b, lora: {rank: 16}}")
    four_bits = "model={path: llama-3.1-70b, lora: {rank: 16, quantize: 4bit}}"
    found = shown(capsys, "plan", *one, four_bits, "--json")
    assert found["chosen"]["fits"]


def test_405b_on_8_devices_says_memory_first(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["demo", "model={path: llama-3.1-405b}", "data={seq_len: 4096}", "train.global_batch=64"]
    assert "memory" in advice(capsys, *large, "cluster={device: H100-SXM5-80GB}")


def test_a_batch_that_1000_devices_can_not_share(capsys: pytest.CaptureFixture[str]) -> None:
    thousand = ["demo", "model={path: llama-3-8b}", "data={seq_len: 4096}", "train.global_batch=1024"]
    found = advice(capsys, *thousand, "cluster={device: H100-SXM5-80GB, nodes: 125}")
    assert "1000 devices can share" in found


def test_validate_fits_80_characters(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["validate", str(DATA / "published_2.csv")]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    assert "megatron-bridge-moe" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "time", "memory"), [("published", 0.06, 0.10), ("published_2", 0.165, 0.16), ("published_3", 0.08, None)]
)
def test_all_three_public_files_are_read(
    capsys: pytest.CaptureFixture[str], name: str, time: float, memory: float | None
) -> None:
    found = shown(capsys, "validate", str(DATA / f"{name}.csv"), "--json")
    assert found["step_time"]["mape"] <= time
    assert memory is None or found["memory"]["mape"] <= memory
    assert found["facts"]["inferred"]["rows"] > 0
    assert 0.7 <= found["interval"]["inside"] <= 0.97
    if name == "published":
        assert found["memory_check"]["refused_share"] <= 0.03
    if name == "published_2":
        assert found["memory_check"]["failed"] >= 45
        assert found["memory_check"]["accepted"] <= 6
