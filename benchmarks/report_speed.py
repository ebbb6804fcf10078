"""How long a report of a long run takes: a metrics.jsonl of a million steps is made, read and rendered.

python benchmarks/report_speed.py [--steps 1000000]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from toolkit.reports.reader import read_run
from toolkit.reports.run_page import render

PARTS = ("data", "forward", "backward", "grad_sync", "param_gather", "optimizer", "agree", "checkpoint", "other")


def write(path: Path, steps: int) -> None:
    """Records like those of a run with ZeRO, every tenth in detail."""
    stats = json.dumps({"min": 0.1, "mean": 0.2, "max": 0.3, "min_rank": 0, "max_rank": 3})
    values = ("wall_seconds", "busy_seconds", "comm_seconds", "memory_bytes", "cpu_percent", "host_memory_bytes")
    ranks = "{" + ", ".join(f'"{name}": {stats}' for name in values) + "}"
    parts = "{" + ", ".join(f'"{name}": 0.012345' for name in PARTS) + "}"
    chance = random.Random(0)
    with path.open("w") as file:
        for step in range(1, steps + 1):
            loss = 10 / step**0.2 + chance.random() / 10
            detail = f', "ranks": {ranks}' if step % 10 == 0 else ""
            file.write(
                f'{{"step": {step}, "loss": {loss}, "lr": 0.0001, "grad_norm": {chance.random()}, "tokens": 4096, '
                f'"step_seconds": 0.1, "tokens_per_second": 40960.0, "mfu": 0.4, "memory_bytes": 123456789, '
                f'"comm_seconds": 0.01, "data_seconds": 0.001, "time": {1.7e9 + step / 10}, "hfu": 0.5, '
                f'"wall_seconds": 0.11, "parts": {parts}, "skipped": 0, "checkpoint_step": 0{detail}}}\n'
            )


def main() -> None:
    """Print seconds and bytes as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        write(path / "metrics.jsonl", args.steps)
        wall, cpu = time.perf_counter(), time.process_time()
        page = render([read_run(path)])
        seconds, cpu = time.perf_counter() - wall, time.process_time() - cpu
        size = (path / "metrics.jsonl").stat().st_size
    print(json.dumps({"steps": args.steps, "file_bytes": size, "seconds": seconds, "cpu_seconds": cpu,
                      "page_bytes": len(page.encode())}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
