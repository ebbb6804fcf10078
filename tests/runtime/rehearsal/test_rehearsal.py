"""Rehearsed ranks against real ones, short models against full ones, and planted defects that are found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.rehearsals import tiny_row
from toolkit.cli import main
from toolkit.errors import BadInput, NotRehearsable
from toolkit.launching.launchers import Command
from toolkit.plans.plan import Plan
from toolkit.recipe.file import make_recipe
from toolkit.runtime.metrics.memory import _largest_growth
from toolkit.runtime.rehearsal.reads import ARITHMETIC_IN_PLACE, INSIDE, _attention_workspace
from toolkit.runtime.rehearsal.report import RoleReport
from toolkit.runtime.supervision.warm_pool import WarmProcess
from toolkit.sessions import rehearse as session
from toolkit.sessions.rehearse import Rehearsal, axis_of, choose_ranks, refuse_unfakeable, rehearse
from toolkit.sessions.resolve import resolve
from toolkit.units import GIB

pytestmark = pytest.mark.slow

BOUND = 0.01
"""Largest relative difference between rehearsed and measured live bytes."""
PLANS = {
    "zero 2": ("strategy.name=zero", "strategy.zero_stage=2"),
    "zero 3": ("strategy.name=zero", "strategy.zero_stage=3", "strategy.zero_variant=plain"),
    "tensor": ("strategy.name=tensor_parallel", "strategy.tp=2"),
    "pipeline": ("strategy.name=pipeline", "strategy.pp=2", "strategy.micro_batch=1"),
}


def rehearsed(mapping: dict[str, Any], *overrides: str, **options: Any) -> Rehearsal:
    return rehearse(resolve(make_recipe(mapping, overrides), 2), **options)


@pytest.mark.parametrize(
    "name",
    [
        "zero-2 bf16",
        "tensor bf16-recompute",
        "pipeline fp32-recompute",
        "hybrid bf16-recompute",
        "zero-3-lora fp32",
        "interleaved bf16",
    ],
)
def test_rehearsed_bytes_are_the_measured_ones(name: str) -> None:
    """A sample of `python -m benchmarks.rehearsals --harness`."""
    row = tiny_row(name)
    assert row.rehearsed_bytes == pytest.approx(row.measured_bytes, rel=BOUND)


@pytest.mark.parametrize("tokens", [64, 256])
def test_the_workspace_of_attention_on_a_cpu_is_counted(tokens: int) -> None:
    """Bytes that torch's kernel allocates beyond its results, with gradients in both layouts."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query, key, value = (torch.randn(2, 2, tokens, 32) for _ in range(3))
    output, stats = flash(query, key, value, 0.0, True)
    for gradient in (torch.ones(2, 2, tokens, 32), torch.ones(2, tokens, 2, 32).transpose(1, 2)):
        given = (gradient, query, key, value, output, stats, 0.0, True)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
            results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*given)
        inside = _largest_growth(watch) - sum(one.nbytes for one in results)
        assert sum(one.nbytes for one in _attention_workspace(given)) == pytest.approx(inside, abs=1024)


@pytest.mark.parametrize(
    ("operator", "types"),
    [
        (torch.ops.aten.add.Tensor, (torch.float32, torch.bfloat16)),
        (torch.ops.aten.mul.Tensor, (torch.bfloat16, torch.bfloat16)),
        (torch.ops.aten.add_.Tensor, (torch.float32, torch.bfloat16)),
        (torch.ops.aten.sub_.Tensor, (torch.bfloat16, torch.float32)),
    ],
)
def test_copies_of_operands_of_another_type_are_counted_on_a_cpu(operator: Any, types: tuple[torch.dtype, ...]) -> None:
    """torch casts operands to their common type before it adds or multiplies."""
    given = tuple(torch.ones(1000, dtype=kind) for kind in types)
    made = 0 if operator._overloadpacket in ARITHMETIC_IN_PLACE else 1000 * torch.result_type(*given).itemsize
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        operator(*given)
    assert sum(one.nbytes for one in INSIDE[operator](given)) == _largest_growth(watch) - made


def test_short_models_give_the_figures_of_the_full_one(recipe_mapping: dict[str, Any]) -> None:
    """25 layers and 3 micro-batches, data parallel: extrapolated figures equal those of a run of everything."""
    recipe_mapping["model"]["config"] |= {"num_hidden_layers": 25, "hidden_size": 64}
    recipe_mapping["model"]["precision"] = "bf16"
    recipe_mapping["train"]["global_batch"] = 6
    recipe_mapping["data"] = {"path": "synthetic", "tokenizer": "bytes", "seq_len": 32, "packing": False}
    axes = ("strategy.name=data_parallel", "strategy.micro_batch=1", "strategy.recompute=none")
    short = rehearsed(recipe_mapping, *axes, ranks="0")
    full = rehearsed(recipe_mapping, *axes, ranks="0", every_layer=True)
    for role, whole in zip(short.roles, full.roles, strict=True):
        assert role.extrapolated
        assert not whole.extrapolated
        same_figures(role, whole)


def same_figures(role: RoleReport, whole: RoleReport) -> None:
    for one, other in zip(role.phases, whole.phases, strict=True):
        assert one.device_peak_bytes == pytest.approx(other.device_peak_bytes, rel=0.003), one.name
        assert one.host_peak_bytes == pytest.approx(other.host_peak_bytes, rel=0.003), one.name
    assert role.step.flops == whole.step.flops
    assert role.step.host_syncs == whole.step.host_syncs
    assert role.step.host_copies == whole.step.host_copies
    assert role.saved_bytes == pytest.approx(whole.saved_bytes, rel=0.003)
    calls = [{(row["kind"], tuple(row["group"])): row for row in report.step.traffic} for report in (role, whole)]
    assert calls[0].keys() == calls[1].keys()
    for key, row in calls[0].items():
        assert row["bytes"] == pytest.approx(calls[1][key]["bytes"], rel=0.003)


@pytest.mark.parametrize(
    ("plan", "defect", "ranks", "words"),
    [
        ("zero 2", "extra_collective", (0, 1), "allreduce of 3 float32"),
        ("zero 2", "smaller_buckets", (0, 1), "stage_1_and_2.py"),
        ("zero 2", "swapped_order", (0, 1), "call"),
        ("zero 3", "gather_on_one_rank", (0, 1), "partition_parameters.py"),
        ("tensor", "left_out_sum", (0, 1), "collectives.py"),
        ("pipeline", "half_a_message", (0, 1), "send"),
        ("pipeline", "extra_collective_on_a_stage", (0, 1), "planted_defects.py"),
    ],
)
def test_planted_defects_are_found(
    plan: str,
    defect: str,
    ranks: tuple[int, int],
    words: str,
    recipe_mapping: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(backend: str, files: Sequence[str]) -> WarmProcess:
        from tests.runtime.rehearsal import planted_defects

        return WarmProcess.start(Command(argv=(defect, *files)), planted_defects.enter)

    monkeypatch.setattr(session, "_start", start)
    result = rehearsed(recipe_mapping, *PLANS[plan])
    assert result.mismatches
    first = result.mismatches[0]
    assert first.ranks == ranks
    assert "rank 0: " in first.what
    assert "rank 1: " in first.what
    assert any(words in one.what for one in result.mismatches), [one.what for one in result.mismatches]


def test_a_pipeline_without_defects_matches(recipe_mapping: dict[str, Any]) -> None:
    """The stage with the loss broadcasts it on another line than those that receive it."""
    assert rehearsed(recipe_mapping, *PLANS["pipeline"]).mismatches == ()


def full_size(**strategy: Any) -> dict[str, Any]:
    return {
        "name": "full-size",
        "model": {"path": "meta-llama/Llama-3.1-8B", "init": "scratch", "precision": "bf16"},
        "data": {"path": "synthetic", "tokenizer": "bytes", "seq_len": 4096, "packing": False},
        "train": {"global_batch": 32, "steps": 2},
        "strategy": {"name": "zero", "micro_batch": 1, "recompute": "none", **strategy},
        "cluster": "dgx-h100",
    }


def test_llama_8b_takes_the_bytes_of_a_gpu_run() -> None:
    """bf16, ZeRO 3 on 8 devices, 4,096 tokens, 4 micro-batches: 45.04 GiB of live tensors per device.

    Released weights are freed: torch's own linear layer would keep 14 GiB of them for the backward pass.
    """
    plan = full_size(zero_stage=3, zero_variant="plain", offload="none")
    (role,) = rehearse(resolve(make_recipe(plan)), "0").roles
    assert role.step.device_peak_bytes / GIB == pytest.approx(45.04, rel=0.003)
    assert role.step.parts["gathered"] < 2.5 * GIB
    assert sum(role.step.parts.values()) == role.step.device_peak_bytes
    assert role.resident_bytes < 2 * GIB


def test_json_and_page_say_what_was_rehearsed(
    recipe_mapping: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, page = tmp_path / "recipe.yaml", tmp_path / "page.html"
    recipe_mapping["data"]["seq_len"] = 48  # no size of the model, so that squares of it can be told
    recipe.write_text(json.dumps(recipe_mapping))
    assert main(["rehearse", str(recipe), *PLANS["zero 2"], "--nproc", "2", "--json", "--html", str(page)]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert result["fits"] is True
    assert [role["rank"] for role in result["roles"]] == [0, 1]
    role = result["roles"][0]
    assert sum(role["parts"].values()) == role["device_peak_bytes"]
    assert len(role["largest_tensors"]) == 10
    assert role["flops"] > 0
    assert {"kind", "group", "calls", "bytes", "sites"} == set(role["collectives"][0])
    assert role["square_tensors"] == 0
    dp = role["traffic"]["dp"]
    assert dp["rehearsed_bytes"] == pytest.approx(dp["predicted_bytes"], rel=0.02)
    assert "2 of 2" in output.err
    text = page.read_text()
    assert "rank 1" in text
    assert "fits: rank" in text


def test_qlora_holds_4_bit_weights() -> None:
    """Llama 8B on 8 devices with recompute: linear layers in 0.516 bytes per weight, tables and norms in 16 bits."""
    plan = full_size() | {"strategy": {"name": "data_parallel", "micro_batch": 1, "recompute": "full"}}
    plan["model"] |= {"init": "pretrained", "lora": {"rank": 16, "quantize": "4bit"}}
    (role,) = rehearse(resolve(make_recipe(plan)), "0").roles
    tables = 2 * 128_256 * 4096
    linear = 8_030_261_248 - tables - 65 * 4096
    quantized = linear / 2 + linear / 64 + 4 * linear / 64 / 256
    adapters = 32 * 16 * (3 * (4096 + 14336) + 2 * (4096 + 4096) + 2 * (4096 + 1024))
    expected = quantized + 2 * (tables + 65 * 4096 + adapters)
    assert role.step.parts["params"] == pytest.approx(expected, rel=0.002)
    assert role.step.device_peak_bytes / GIB == pytest.approx(8.0, rel=0.01)


def test_ranks_that_do_not_exist_are_refused(recipe_mapping: dict[str, Any]) -> None:
    plan = resolve(make_recipe(recipe_mapping), 2).chosen.plan
    with pytest.raises(BadInput, match="rank 7 given; the plan has ranks 0 to 1"):
        choose_ranks(plan, "0,7")
    with pytest.raises(BadInput, match="roles, all or ranks"):
        choose_ranks(plan, "first")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "a rehearsal needs the cluster of the plan"),
        (("cluster=dgx-h100", "--ranks", "0,99"), 2, "rank 99 given; the plan has ranks 0 to 7"),
        (("cluster=dgx-h100", "model.config=null", "model.path=nobody/unknown"), 2, "nobody/unknown"),
        (("cluster=dgx-h100", "model.attention=flash_attention_2"), 3, "flash_attention_2"),
    ],
)
def test_bad_input_has_one_message(
    arguments: tuple[str, ...],
    code: int,
    words: str,
    recipe_mapping: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(recipe_mapping))
    assert main(["rehearse", str(recipe), *arguments]) == code
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_what_has_no_fake_is_refused_by_name(recipe_mapping: dict[str, Any]) -> None:
    resolved = resolve(make_recipe(recipe_mapping, ["model.attention=flash_attention_2"]), 2)
    with pytest.raises(NotRehearsable, match="flash_attention_2"):
        refuse_unfakeable(resolved.recipe, resolved.chosen.plan)


def test_tensors_of_the_sequence_squared_are_counted(recipe_mapping: dict[str, Any]) -> None:
    """Eager attention makes scores and masks of 48 × 48 tokens; the model has no size of 48."""
    recipe_mapping["data"]["seq_len"] = 48
    recipe_mapping["model"] |= {"attention": "eager"}
    (role,) = rehearsed(recipe_mapping, *PLANS["zero 2"], ranks="0").roles
    assert role.square_tensors
    assert all("48, 48" in what for what in role.square_tensors)


@pytest.mark.parametrize(
    ("kind", "ranks", "axis"),
    [
        ("allreduce", [4, 5], "tp"),
        ("allreduce", [0, 2], "dp"),
        ("_allgather_base", [5, 7], "dp"),
        ("send", [0, 4], "pp"),
        ("allreduce", list(range(8)), "other"),
    ],
)
def test_collectives_belong_to_axes(kind: str, ranks: list[int], axis: str) -> None:
    assert axis_of(kind, ranks, Plan(strategy="hybrid", dp=2, tp=2, pp=2)) == axis
