"""Seconds of `toolkit train` before its first worker process exists: reading, checks, planning, the run directory.

Run:  python benchmarks/launch_overhead.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

REPEATS = 5
CASES = {
    "data parallel, 2 processes": ["strategy.name=data_parallel"],
    "every strategy considered, 2 processes": [],
    "ZeRO 3, 8 processes": ["strategy.name=zero", "strategy.zero_stage=3"],
}


def seconds_before_the_first_worker(arguments: list[str], nproc: int) -> float:
    """From the start of the command to the start of its first worker; everything is ended then."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = str(Path(directory) / "run")
        options = ["--nproc", str(nproc), "--run-dir", run_dir, "metrics.wandb.mode=disabled"]
        argv = [sys.executable, "-m", "toolkit.cli", "train", "recipes/demo.yaml", *arguments, *options]
        started = time.time()
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        try:
            return first_worker(psutil.Process(process.pid)) - started
        finally:
            parent = psutil.Process(process.pid)
            parent.suspend()  # it would start more workers, which would be in the way of the next run
            children = parent.children(recursive=True)
            process.kill()
            process.wait()
            for child in children:
                child.kill()
            psutil.wait_procs(children)


def first_worker(parent: psutil.Process) -> float:
    """When the first worker was started, by the system's clock."""
    while True:
        for child in parent.children(recursive=True):
            if "toolkit.worker" in child.cmdline():
                return child.create_time()
        time.sleep(0.005)


def main() -> None:
    """Print a line per case."""
    bare = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        bare.append(time.perf_counter() - started)
    print(f"{'python -c pass':42} {statistics.median(bare):6.2f} s")
    for name, arguments in CASES.items():
        nproc = 8 if "8 processes" in name else 2
        found = [seconds_before_the_first_worker(arguments, nproc) for _ in range(REPEATS)]
        print(f"{name:42} {statistics.median(found):6.2f} s (most {max(found):.2f} s)")


if __name__ == "__main__":
    main()
