"""Rows of a CSV file of published measurements, as text, with the checks that make one message of every problem."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import BadInput, Problem

REQUIRED = (
    "source_id", "model", "n_layers", "hidden", "ffn", "heads", "vocab", "seq_len", "gpu", "n_gpus", "tp", "pp", "dp",
    "zero_stage", "micro_batch", "global_batch", "precision", "act_ckpt", "framework", "step_time_s_derived",
)  # fmt: skip
"""Columns required for a prediction; the others have default values."""
NUMBERS = (
    "n_layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq_len", "gpu_mem_gb", "n_gpus", "gpus_per_node",
    "inter_gbps_per_gpu", "tp", "pp", "vpp", "cp", "dp", "shard_group", "zero_stage", "micro_batch", "grad_accum",
    "global_batch", "tok_s_gpu", "step_time_s", "mem_gib", "step_time_s_derived", "lora_rank", "head_dim", "n_experts",
    "top_k", "moe_ffn", "shared_ffn", "n_dense_layers", "ep", "etp", "mem_smi_gib", "fits",
)  # fmt: skip
MISSING = frozenset(("", "?", "-", "none", "n/a", "na", "nan", "null", "unknown", "auto", "not stated"))
YES = frozenset(("1", "1.0", "true", "yes", "y", "on"))
NO = frozenset(("0", "0.0", "false", "no", "n", "off"))


@dataclass(frozen=True)
class PublishedRow:
    """One line of the file, as text, with its line number."""

    number: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """A cell, stripped of blanks."""
        return (self.cells.get(column) or "").strip()

    def number_of(self, column: str) -> float | None:
        """A cell as a number; None if it is empty, negative or infinite."""
        text = self.text(column).replace(",", "")
        value = None if text.lower() in MISSING else float(text)
        return value if value is not None and 0 <= value < math.inf else None

    def count(self, column: str, default: int = 1) -> int:
        """A cell as an integer of at least 1; `default` if it states none."""
        value = self.number_of(column)
        return default if value is None or value < 1 else round(value)


class NotScorable(Exception):
    """A row that lacks what a prediction needs; the message is the reason."""


def read_rows(path: Path) -> list[PublishedRow]:
    """All rows; raises `BadInput` that names missing columns, and cells that should be numbers."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise BadInput(str(path), "is a device or a pipe; a CSV file is required")
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = [PublishedRow(number, _texts(cells)) for number, cells in enumerate(reader, 2)]
            columns = reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(str(path), f"can't be read as CSV: {error}") from error
    missing = [column for column in REQUIRED if column not in columns]
    if missing:
        raise BadInput(str(path), f"missing columns: {', '.join(missing)}")
    if not rows:
        raise BadInput(str(path), "has a header, but no rows; at least one measurement is required")
    problems = list(_text_in_numbers(rows))
    if problems:
        raise BadInput(str(path), problems)
    return rows


def _texts(cells: Mapping[str | None, object]) -> dict[str, str]:
    """Cells with a column name: a line may be longer or shorter than the header."""
    return {column: text for column, text in cells.items() if column is not None and isinstance(text, str)}


def _text_in_numbers(rows: list[PublishedRow]) -> Iterator[Problem]:
    for row in rows:
        for column in NUMBERS:
            try:
                row.number_of(column)
            except ValueError:
                what = f"{row.text(column)!r} given; a number is required, or an empty cell"
                yield Problem(f"row {row.number}, column {column}", what)
