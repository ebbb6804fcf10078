"""Wall time of `toolkit plan`, whole process from a cold shell, against `import torch` in the same run.

Run:  python benchmarks/plan_latency.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

CASES = {
    "demo, 2 processes": ["recipes/demo.yaml", "--nproc", "2"],
    "Llama-3 8B, 8 H100": ["recipes/demo.yaml", "model={path: llama-3-8b}", "cluster=dgx-h100"],
    "Llama-3.1 405B, 16,384 H100": [
        "recipes/demo.yaml",
        "model={path: llama-3.1-405b}",
        "cluster={device: H100-SXM5-80GB, nodes: 2048, devices_per_node: 8}",
        "data={seq_len: 8192, path: synthetic}",
        "train.global_batch=2048",
    ],
}


def median_seconds(command: list[str], repeats: int = 5) -> float:
    """Median of several runs after one that leaves bytecode behind, as an installation does."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    seconds = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=env)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def main() -> None:
    """Print a line per case."""
    torch = median_seconds([sys.executable, "-c", "import torch"])
    print(f"{'python -c import torch':30} {torch:6.2f} s")
    for name, arguments in CASES.items():
        seconds = median_seconds([sys.executable, "-m", "toolkit.cli", "plan", *arguments])
        print(f"{name:30} {seconds:6.2f} s  {seconds / torch:5.2f} of it")


if __name__ == "__main__":
    main()
