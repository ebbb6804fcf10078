"""`toolkit validate`: the bars that we hold, and what happens with files that are not as they should be."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest

from toolkit.clusters.devices import find_device, nearest_names
from toolkit.cost.published import execution_of, recompute_of
from toolkit.cost.published_rows import REQUIRED, PublishedRow, read_rows
from toolkit.cost.software import software_of
from toolkit.cost.validation import regret, spearman, validate
from toolkit.errors import BadInput

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "data" / "published.csv"


@pytest.fixture(scope="module")
def result() -> dict:  # type: ignore[type-arg]
    return validate(PUBLISHED)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    with PUBLISHED.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_step_times_are_predicted_within_the_bars(result: dict) -> None:  # type: ignore[type-arg]
    assert result["by_split"]["calib"]["mape"] <= 0.05
    assert result["by_split"]["dev"]["mape"] <= 0.06
    assert result["memory"]["mape"] <= 0.065
    assert result["memory_check"]["refused_share"] <= 0.03
    assert result["ranking"]["regret"] <= 1.03


def test_the_json_is_the_contracts(result: dict) -> None:  # type: ignore[type-arg]
    assert result["rows"] == 1113
    assert result["scored"] + sum(result["unscored"].values()) == result["rows"]
    assert set(result["step_time"]) >= {"mape", "median_ape", "bias"}
    assert set(result["memory"]) >= {"scored", "mape", "bias"}
    assert set(result["ranking"]) == {"groups", "spearman", "regret"}
    json.dumps(result, allow_nan=False)


def test_a_missing_column_is_named(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    short = [{k: v for k, v in row.items() if k not in ("hidden", "gpu")} for row in rows[:2]]
    with pytest.raises(BadInput, match="missing columns: hidden, gpu"):
        validate(write(tmp_path / "short.csv", short))


def test_text_in_a_number_names_row_and_column(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    broken = [dict(row) for row in rows[:5]]
    broken[1]["hidden"] = "wide"
    broken[3]["tp"] = "two"
    with pytest.raises(BadInput) as caught:
        validate(write(tmp_path / "broken.csv", broken))
    assert "row 3, column hidden: 'wide' given" in str(caught.value)
    assert "row 5, column tp: 'two' given" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00\x01", b"a,b\n1,2\n"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.csv"
    path.write_bytes(content)
    with pytest.raises(BadInput):
        validate(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="can't be read"):
        validate(tmp_path / "none.csv")


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.write_text(",".join(REQUIRED) + "\n")
    with pytest.raises(BadInput, match="no rows"):
        validate(path)


def test_a_device_is_not_read() -> None:
    with pytest.raises(BadInput, match="a CSV file is required"):
        validate(Path("/dev/zero"))


def test_unknown_devices_are_counted_with_the_reason(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    strange = [{**rows[0], "gpu": "TPU v5p"}, rows[1]]
    found = validate(write(tmp_path / "strange.csv", strange))
    assert found["scored"] == 1
    assert found["unscored"] == {"unknown device 'TPU v5p'": 1}


def test_unusual_cells_never_crash(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    """Any cell may be empty or hold a placeholder; the row is scored or counted."""
    chance = random.Random(0)
    numbers = ("", "?", "none", "unknown", "0", "1", "1.0", "3", "-1", "0.5")
    words = ("", "?", "none", "unknown", "1", "0", "yes", "something new")
    sample = [dict(row) for row in chance.sample(rows, 300)]
    numeric = {"row_id", "source_id"} ^ set(rows[0])
    for row in sample:
        for column in chance.sample(sorted(numeric), 6):
            is_number = all(not r[column] or r[column].replace(".", "", 1).isdigit() for r in rows[:300:7])
            row[column] = chance.choice(numbers if is_number else words)
    found = validate(write(tmp_path / "fuzz.csv", sample))
    assert found["scored"] + sum(found["unscored"].values()) == 300
    json.dumps(found, allow_nan=False)


def test_columns_that_can_be_done_without(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    lean = [{column: row[column] for column in REQUIRED} for row in rows[:20]]
    assert validate(write(tmp_path / "lean.csv", lean))["scored"] == 20


def test_missing_micro_batch_follows_from_the_batch(rows: list[dict[str, str]]) -> None:
    staged = next(row for row in rows if row["source_id"] == "torchtitan-2412" and row["pp"] == "8")
    run = execution_of(PublishedRow(2, staged))
    assert run.grad_accum == 8  # as many micro-batches as stages
    assert run.micro_batch * run.grad_accum * run.dp == int(staged["global_batch"])


@pytest.mark.parametrize(
    ("framework", "fusion", "flash", "tp_overlap"),
    [
        ("NeMo/Megatron", "compiled", 3, True),
        ("Megatron-LM (2021)", "kernels", 2, False),
        ("torchtitan FSDP2 eager", "eager", 2, False),
        ("torchtitan FSDP2+TP compile AsyncTP", "compiled", 2, True),
        ("HF Trainer + DeepSpeed ZeRO-3", "eager", 2, False),
        ("MaxText JAX/XLA FSDP(+DP)", "compiled", 3, False),
        ("PyTorch FSDP1 (Composer)", "eager", 1, False),
        ("a framework nobody has heard of", "eager", 2, False),
    ],
)
def test_flags_follow_from_the_words_of_a_framework(framework: str, fusion: str, flash: int, tp_overlap: bool) -> None:
    found = software_of(framework, device="H100-SXM5-80GB", flash=True, precision="bf16", pipeline=False)
    assert (found.fusion, found.flash, found.tp_overlap) == (fusion, flash, tp_overlap)


def test_recompute_cells() -> None:
    assert recompute_of("full").matmul == 1
    assert recompute_of("selective").attention == 1
    assert recompute_of("selective_layer2").matmul == 0.5
    assert recompute_of("none") == recompute_of("") == recompute_of("?") == recompute_of("unknown")


def test_silent_columns_follow_from_others(rows: list[dict[str, str]]) -> None:
    llama = next(row for row in rows if row["model"] == "llama3-8b" and row["split"] == "dev")
    assert execution_of(PublishedRow(2, {**llama, "gated_mlp": ""})).model.gated_mlp
    assert not execution_of(PublishedRow(2, {**llama, "gated_mlp": "0"})).model.gated_mlp
    assert execution_of(PublishedRow(2, {**llama, "intra_node": "PCIe Gen4"})).cluster.intra_bytes_per_second == 25e9
    assert (
        execution_of(PublishedRow(2, {**llama, "intra_node": "NVLink3 (400GB/s)"})).cluster.intra_bytes_per_second
        == 200e9
    )


def test_device_names() -> None:
    def name(text: str, memory_gb: float | None = None, hint: str = "") -> str | None:
        found = find_device(text, memory_gb=memory_gb, hint=hint)
        return found.name if found else None

    assert name("A100", 40) == "A100-SXM4-40GB"
    assert name("A100", 80) == "A100-SXM4-80GB"
    assert name("NVIDIA H100 80GB HBM3") == "H100-SXM5-80GB"
    assert name("H100", 80, "PCIe5") == "H100-PCIe-80GB"
    assert name("h200") == "H200-SXM"
    assert name("GB200") == "GB200"
    assert name("abacus") is None
    assert "H100-SXM5-80GB" in nearest_names("H100-SXM-80GB")


def test_regret_and_rank_correlation_by_hand() -> None:
    pairs = [(1.0, 12.0), (2.0, 10.0), (3.0, 11.0)]
    assert regret(pairs) == pytest.approx(1.2)
    assert spearman(pairs) == pytest.approx(-0.5)
    assert spearman([(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]) == 1


def test_rows_keep_their_line_number(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    assert read_rows(write(tmp_path / "two.csv", rows[:2]))[1].number == 3
