"""Bad inputs as a table: each is run as a command, and must end with one message, the right exit code, in 5 seconds.

python -m benchmarks.bad_inputs              all of them in this process, and a sample as processes
python -m benchmarks.bad_inputs --list       only show them
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from benchmarks.harness.tiny_llama import TINY_LLAMA
from toolkit.cli import main as toolkit

LONGEST_SECONDS = 5.0
EVERY_PROCESS = 40
"""Every so many inputs, one is run as a process of its own, too."""
RECIPE = {
    "name": "tiny",
    "model": {"config": dict(TINY_LLAMA), "precision": "fp32"},
    "data": {"path": "synthetic", "tokenizer": "bytes", "seq_len": 32},
    "train": {"global_batch": 8, "steps": 4},
    "cluster": {"device": "cpu", "devices_per_node": 2},
}


@dataclass(frozen=True)
class BadInput:
    """A command line that must be refused. `{dir}` in arguments stands for the directory with the files."""

    argv: tuple[str, ...]
    words: str = ""
    """What the message has to contain."""
    codes: tuple[int, ...] = (2,)
    files: Mapping[str, bytes] = field(default_factory=dict)


NUMBERS = ("-1", "0.5.1", "many", "[]", "{}", "null", "''", "1e999", "-.inf", ".nan", "true", "2020-01-01", "'1'")
POSITIVE_KEYS = (
    "train.steps", "train.global_batch", "data.seq_len", "train.lr", "checkpoint.keep", "metrics.every",
    "strategy.tp", "strategy.pp", "strategy.micro_batch", "train.grad_clip",
)  # fmt: skip
WORDS = ("nonsense", "17", "[a]", "{a: 1}", "''", "ZERO", "../x", '"\\0"', '"\\e[2J"', "[/b]")
WORD_KEYS = (
    "train.optimizer", "train.schedule", "strategy.name", "data.format", "model.precision", "model.attention",
    "strategy.offload", "strategy.recompute", "cluster", "model.init",
)  # fmt: skip
BROKEN_FILES: Mapping[str, bytes] = {
    "empty": b"",
    "zeros": bytes(100),
    "not UTF-8": b"\xff\xfe\xfd",
    "a list": b"[1, 2]",
    "a number": b"17",
    "nested brackets": b"[" * 5000,
    "an alias bomb": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(9)),
    "a tab": b"\tname: x",
    "an object of Python": b"!!python/object/apply:os.system ['true']",
    "a duplicate key": b"name: a\nname: b\n",
    "unbalanced": b"{",
    "an escape of the terminal": b"\x1b[2J: 1",
}


def inputs() -> Iterator[BadInput]:
    """Every bad input."""
    yield from _commands()
    yield from _recipe_values()
    yield from _recipe_files()
    yield from _other_files()
    yield from _places()


def _commands() -> Iterator[BadInput]:
    yield BadInput((), "usage")
    for word in ("", "trian", "--nonsense", "-", "--", "плана", "plan;ls"):
        yield BadInput((word,), "usage")
    for command in ("plan", "train", "data", "resume", "verify", "export", "report", "emit", "validate", "scale"):
        yield BadInput((command,), "required")
        yield BadInput((command, "--nonsense"))
    for number in ("0", "-1", "x", "1.5", "", "99999999999999999999"):
        yield BadInput(("plan", "{dir}/good.yaml", "--nproc", number), "nproc" if not number.isdigit() else "")
    for port in ("99999", "-1", "x", "65536", ""):
        for command in ("rendezvous", "mailbox"):
            yield BadInput((command, "--port", port), "--port")
    for address in ("", "host", "host:", ":1", "host:x", "host:99999", "host:-1", "a:b:c"):
        yield BadInput(("train", "{dir}/good.yaml", "--rendezvous", address, "--island", "0"))
    for target in ("", "docker", "slurm;ls"):
        yield BadInput(("emit", "{dir}/good.yaml", "--for", target, "--out", "{dir}/out"), "--for")
    for devices in ("0", "-1", "x", "", "1,x", "1,,2"):
        yield BadInput(("scale", "{dir}/good.yaml", "--devices", devices))


def _recipe_values() -> Iterator[BadInput]:
    for key, value in itertools.product(POSITIVE_KEYS, NUMBERS):
        if (key, value) in ALLOWED:
            continue
        yield BadInput(("plan", "{dir}/good.yaml", f"{key}={value}"), codes=(2, 3))
    for key, value in itertools.product(WORD_KEYS, WORDS):
        if (key, value) in ALLOWED:
            continue
        yield BadInput(("plan", "{dir}/good.yaml", f"{key}={value}"), codes=(2, 3))
    for override in (
        "=",
        "=1",
        "train",
        "train.=1",
        ".train=1",
        "train..lr=1",
        "train.lr",
        "no.such.key=1",
        "a=[",
        "a={",
    ):
        yield BadInput(("plan", "{dir}/good.yaml", override))


ALLOWED = {
    *((key, "null") for key in ("strategy.tp", "strategy.pp", "strategy.micro_batch")),
    *((key, "null") for key in ("strategy.offload", "strategy.recompute")),
    *((key, "'1'") for key in ("train.lr", "train.grad_clip")),
}
"""Values with a meaning: null leaves the choice to the planner; YAML reads 1e-3 as text, so fractions may be text."""


def _recipe_files() -> Iterator[BadInput]:
    for command in (("plan",), ("train",), ("data",), ("emit", "--for", "torchrun", "--out", "{dir}/out")):
        for data in BROKEN_FILES.values():
            yield BadInput((command[0], "{dir}/bad.yaml", *command[1:]), "bad.yaml", files={"bad.yaml": data})
        for path in ("{dir}/missing.yaml", "{dir}", "/dev/null", "{dir}/good.yaml/x", "x" * 300):
            yield BadInput((command[0], path, *command[1:]))
    for data in BROKEN_FILES.values():
        yield BadInput(("plan", "{dir}/good.yaml", "cluster={dir}/c.yaml"), files={"c.yaml": data})
        model = "model={path: '{dir}/model/config.json'}"
        yield BadInput(("plan", "{dir}/good.yaml", model), files={"model/config.json": data})
        yield BadInput(("train", "{dir}/good.yaml", "--hostfile", "{dir}/hosts"), files={"hosts": data})


def _other_files() -> Iterator[BadInput]:
    for data in BROKEN_FILES.values():
        yield BadInput(("validate", "{dir}/rows.csv"), files={"rows.csv": data})
        yield BadInput(("report", "{dir}/run"), files={"run/metrics.jsonl": data})
        yield BadInput(("verify", "{dir}/step"), "damaged", files={"step/manifest.json": data})
        yield BadInput(("verify", "{dir}/run"), files={"run/checkpoints/step-00000001/manifest.json": data})
        yield BadInput(("resume", "{dir}/run"), files={"run/recipe.yaml": data})
    for name in ("verify", "resume", "report"):
        for path in ("{dir}/missing", "{dir}", "{dir}/good.yaml", "/dev/null", "x" * 300, "", "{dir}/a[/b]"):
            yield BadInput((name, path))
    for path in ("{dir}/missing", "{dir}", "{dir}/good.yaml", "/dev/null"):
        yield BadInput(("export", path, "{dir}/out"))
        yield BadInput(("validate", path))


def _places() -> Iterator[BadInput]:
    """Places that can't be written to, by root either."""
    for place in ("/proc/x", "/dev/null/x", "{dir}/good.yaml/x", "/sys/x"):
        yield BadInput(("train", "{dir}/good.yaml", "--nproc", "1", "--run-dir", place))
        yield BadInput(("plan", "{dir}/good.yaml", "--html", place))
        yield BadInput(("emit", "{dir}/good.yaml", "--for", "torchrun", "--out", place))
        yield BadInput(("scale", "{dir}/good.yaml", "--devices", "1,2", "--html", place))


def problem_of(bad: BadInput, directory: Path, *, process: bool = False) -> str:
    """Run one bad input; what is wrong with the way it was refused, empty if nothing is."""
    for name, data in {"good.yaml": yaml.safe_dump(RECIPE).encode(), **bad.files}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    argv = [word.replace("{dir}", str(directory)) for word in bad.argv]
    started = time.perf_counter()
    code, error = _as_process(argv) if process else _in_process(argv)
    seconds = time.perf_counter() - started
    if code not in bad.codes:
        return f"exit code {code}, expected {bad.codes}: {error.strip()[-300:]}"
    if "Traceback" in error or len(error.strip()) < 10:
        return f"not one message: {error.strip()[-300:]}"
    if bad.words not in error:
        return f"{bad.words!r} is not in the message: {error.strip()[-300:]}"
    if seconds > LONGEST_SECONDS * (3 if process else 1):  # a process imports first
        return f"took {seconds:.1f} s"
    return ""


def _in_process(argv: list[str]) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = toolkit(argv)
        except SystemExit as stop:  # the parser's own refusal
            code = int(stop.code or 0)
    return code, err.getvalue()


def _as_process(argv: list[str]) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "toolkit", *argv], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def main() -> int:
    """Run all of them; 0 if every one is refused as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the inputs")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    found, wrong = list(inputs()), 0
    for number, bad in enumerate(found):
        if args.list:
            print(json.dumps(bad.argv))
            continue
        for process in [False, True] if number % EVERY_PROCESS == 0 else [False]:
            with tempfile.TemporaryDirectory() as directory:
                problem = problem_of(bad, Path(directory), process=process)
            if problem:
                wrong += 1
                print(f"{bad.argv} {[data[:20] for data in bad.files.values()]}\n    {problem}", flush=True)
    print(f"{len(found) - wrong} of {len(found)} bad inputs are refused as they should be")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
