"""Random files for every reader, for as long as asked: `python -m tests.fuzz --seconds 600` (`make fuzz`).

    python -m tests.fuzz --seconds 60 rows "plan of a run"     these readers only

Each reader runs in a process of its own, two at a time, so that a crash of native code is found, too. A case that fails
is printed, reduced to its smallest form: keep it in FOUND of test_readers.py.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.readers import READERS, Reader
from tests.fuzz.test_readers import check, edited, edits, replaced, replacements

EXAMPLES = 200
HANG_SECONDS = 120
"""Seconds of CPU that a process may take in addition to those that it was asked to run: more is a case that hangs.
The kernel ends it then. By the clock it gets ten times as long, because on a busy machine it hardly runs."""


def fuzz(name: str, seconds: float) -> int:
    """Feed one reader; return the number of cases."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + HANG_SECONDS,) * 2)
    reader, cases, end = READERS[name], 0, time.monotonic() + seconds
    ways: list[tuple[Any, Callable[[Any], bytes]]] = [
        (st.binary(max_size=200), lambda data: data),
        (edits, lambda changes: edited(reader.valid, changes)),
        (replacements, lambda changes: replaced(reader.valid, changes)),
    ]
    while time.monotonic() < end:
        strategy, make = ways[cases // EXAMPLES % len(ways)]
        _feed(reader, strategy, make)
        cases += EXAMPLES
    return cases


def _feed(reader: Reader, strategy: Any, make: Callable[[Any], bytes]) -> None:
    @seed(random.getrandbits(32))
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(drawn=strategy)
    def run(drawn: Any) -> None:
        check(reader, make(drawn))

    run()


def in_process(name: str, seconds: float) -> tuple[str, int, str]:
    """Feed one reader in a process of its own; return its name, exit code and output."""
    command = [sys.executable, "-m", "tests.fuzz", "--reader", name, "--seconds", str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10 * (seconds + HANG_SECONDS))
    except subprocess.TimeoutExpired:
        return name, -1, "no end: a case hangs, or the machine is too busy"
    return name, done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr[-3000:]


def main() -> int:
    """Feed all readers, two at a time; the exit code is 1 if a case failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="per reader")
    parser.add_argument("--reader", choices=list(READERS), help="this one only, in this process")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(READERS)}")
    args = parser.parse_args()
    names = args.names or list(READERS)
    if unknown := [name for name in names if name not in READERS]:
        parser.error(f"{unknown[0]!r} is no reader; give some of {', '.join(READERS)}")
    if args.reader is not None:
        print(f"{args.reader}: {fuzz(args.reader, args.seconds):,} cases")
        return 0
    failed = 0
    with ThreadPoolExecutor(2) as pool:
        for name, code, text in pool.map(lambda name: in_process(name, args.seconds), names):
            failed += code != 0
            print(text.strip() if code == 0 else f"{name}: FAILED with exit code {code}\n{text}", flush=True)
    print(f"{len(names) - failed} of {len(names)} readers without a failure")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
