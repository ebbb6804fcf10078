"""`toolkit report` on damaged run directories: it says what it can, or refuses with a message, and never crashes.

    python -m benchmarks.damaged_reports --count 220

One real run is made. Each try copies its files, damages one to three of them, and runs `report`, `report --html` or a
comparison with the run itself, in a forked process, so that a crash of native code or a hang is seen, too. Counts are
printed at the end: exit codes 0 and 2 without a traceback are right.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import commands
from toolkit.cli import main as toolkit

FILES = ("metrics.jsonl", "events.jsonl", "plan.json", "summary.json", "recipe.yaml", "eval.jsonl", "deepspeed.json")
HANG_SECONDS = 30
GARBAGE = (
    b"", b"\0" * 200, b"\xff\xfe\xfd", b"[" * 100_000, b"{" * 100_000, b"null", b"17", b"[]", b'"text"', b"\n" * 5000,
    b"a: &a [*a]", b"9" * 5000, b"!!python/object/apply:os.system ['true']", b"\x1b[2J\x1b[31m", b'{"\\ud800": 1}',
)  # fmt: skip
VALUES = (
    None, True, "", "\ud800", "\x1b[2J", "[/b]", "<script>", -1, 0, 10**30, 10**400, 1.5, float("inf"), float("nan"),
    [], {}, [None], {"": {}}, [[[]]], "a" * 5000,
)  # fmt: skip


@dataclass(frozen=True)
class Try:
    """One report on a damaged run directory."""

    damage: str
    argv: tuple[str, ...]
    outcome: str
    """`exit code N`, `signal NAME` or `hang`."""
    text: str

    @property
    def ok(self) -> bool:
        """Whether it ended as it should."""
        return self.outcome in ("exit code 0", "exit code 2") and "Traceback" not in self.text


def damage(run: Path, rng: random.Random) -> str:
    """Damage one file; return what was done."""
    path = run / rng.choice([name for name in FILES if (run / name).is_file()])
    data = path.read_bytes()
    kind = rng.choice(["garbage", "cut", "flip", "insert", "value", "value", "value", "delete", "directory", "link"])
    if kind in ("delete", "directory", "link"):
        path.unlink()
        if kind == "directory":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(path.name)
        return f"{kind} of {path.name}"
    at = rng.randrange(len(data) + 1)
    changed = {
        "garbage": rng.choice(GARBAGE),
        "cut": data[:at],
        "flip": data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
        "insert": data[:at] + rng.choice(GARBAGE)[:5000] + data[at:],
        "value": _with_other_values(data, rng),
    }[kind]
    path.write_bytes(changed)
    return f"{kind} in {path.name}"


def _with_other_values(data: bytes, rng: random.Random) -> bytes:
    """JSON, or lines of JSON, with values replaced; anything else becomes one of the values."""
    lines = data.splitlines() if data.count(b"\n") > 1 and data.startswith(b'{"') else [data]
    number = rng.randrange(len(lines))
    try:
        document = json.loads(lines[number])
    except (ValueError, RecursionError):
        return json.dumps(rng.choice(VALUES)).encode()
    places = list(_places(document))
    for _ in range(rng.randrange(1, 4)):
        if places:
            node, key = rng.choice(places)
            node[key] = rng.choice(VALUES)
    lines[number] = json.dumps(document).encode()
    return b"\n".join(lines) + b"\n"


def _places(node: Any) -> Any:
    """(container, key) of every value inside a JSON document."""
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from _places(node[key])


def report(argv: Sequence[str], output: Path) -> str:
    """Run the command in a forked process; how it ended."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(HANG_SECONDS)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = 99
        try:
            code = toolkit(list(argv))
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGALRM:
        return "hang"
    return f"exit code {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"


def attempt(run: Path, directory: Path, rng: random.Random) -> Try:
    """Copy a run without its checkpoints, damage it, report on it."""
    copy = directory / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for name in FILES:
        if (run / name).is_file():
            shutil.copy(run / name, copy / name)
    done = "; ".join(damage(copy, rng) for _ in range(rng.randrange(1, 4)))
    ways = [[str(copy)], [str(copy), "--html", str(directory / "page.html")], [str(copy), str(run)]]
    argv = ("report", *rng.choice(ways))
    output = directory / "output"
    return Try(done, argv, report(argv, output), output.read_text(errors="replace"))


def make_run(directory: Path) -> Path:
    """A real run of twelve steps."""
    recipe = commands.write_recipe(directory, steps=12, every=6)
    process = commands.start(
        commands.toolkit("train", str(recipe), "--nproc", "2", "--run-dir", str(directory / "run")), directory
    )
    text, _ = process.communicate()
    assert process.returncode == 0, text
    return directory / "run"


def main() -> int:
    """Measure and print the counts; the exit code is 1 if a report crashed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=220)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="reports-") as name:
        run = make_run(Path(name))
        tries = [attempt(run, Path(name), rng) for _ in range(args.count)]
    for one in tries:
        if not one.ok:
            print(f"{one.damage}: {' '.join(one.argv)}: {one.outcome}\n{one.text[-3000:]}")
    print(
        f"{sum(not one.ok for one in tries)} crashes in {len(tries)} tries: {dict(Counter(t.outcome for t in tries))}"
    )
    return 0 if all(one.ok for one in tries) else 1


if __name__ == "__main__":
    sys.exit(main())
