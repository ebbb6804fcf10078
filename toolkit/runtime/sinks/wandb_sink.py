"""Weights & Biases: one W&B run per run directory, across all resumes, written by rank 0."""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.recipe.metrics_sections import Wandb
from toolkit.runtime.metrics.record import Record
from toolkit.secrets import redact

ID_FILE = "wandb-id"
"""In the run directory: the run's id, the same for all its resumes."""


class WandbSink:
    """Offline by default: no account is needed, and `wandb sync` uploads it later.

    W&B ignores steps that go back. Offline, where nobody is watching, steps are therefore sent only when a checkpoint
    covers them, or at the end: a step that a crash makes the run repeat has not been sent yet. Online they are sent at
    once, and repeated steps are not sent again.
    """

    def __init__(
        self,
        section: Wandb,
        name: str,
        directory: Path,
        *,
        hidden: Iterable[str] = (),
        resumable: bool = False,
        say: Callable[[str], object] = print,
    ) -> None:
        self._section, self._name, self._directory = section, name, directory
        self._hidden, self._say = tuple(hidden), say
        self._holds_back = resumable and section.mode == "offline"
        self._held: list[Record] = []
        self._evaluations: dict[int, dict[str, Any]] = {}
        self._run: Any = None
        self._id, self._last_step = "", 0

    def start(self, info: Mapping[str, Any]) -> None:
        import wandb

        (self._directory / "wandb").mkdir(parents=True, exist_ok=True)
        self._id = _own_id(self._directory / ID_FILE)
        self._last_step = last_step(self._directory, self._id)
        self._run = wandb.init(
            id=self._id,
            resume="allow" if self._section.mode == "online" else None,  # offline, every file carries the same id
            project=self._section.project,
            entity=self._section.entity,
            group=self._section.group,
            tags=list(self._section.tags) or None,
            name=self._name,
            dir=str(self._directory),
            mode=self._section.mode,
            config=redact(dict(info), self._hidden),
            # No code, console, git state, command line or host leave the machine, and no environment variable is
            # stored; counters of all ranks are in the records, so its own of this process are off.
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
            ),
        )
        self._catch_up(int(info.get("done", 0)))

    def log(self, record: Record) -> None:
        self._held.append(record)
        if not self._holds_back or record.checkpoint_step >= self._held[0].step:
            self._hand_over(record.checkpoint_step if self._holds_back else record.step)

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """One evaluation, at the step that was just logged; it goes with that step's record."""
        if self._held:
            self._evaluations[record["step"]] = _evaluation(record)
        else:
            self._run.log(_evaluation(record), step=record["step"])

    def rewind(self, step: int) -> None:
        while self._held and self._held[-1].step > step:
            self._evaluations.pop(self._held.pop().step, None)

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._held:
            self._hand_over(self._held[-1].step)
        self._run.summary.update(redact(dict(summary), self._hidden))
        self._add_report()
        self._run.finish(exit_code=0 if summary.get("status") == "done" else 1)

    def _catch_up(self, done: int) -> None:
        """Send the steps of an earlier attempt that a checkpoint covers but that a crash kept from being sent."""
        evaluations = {line["step"]: _evaluation(line) for line in _lines(self._directory / "eval.jsonl")}
        for values in _lines(self._directory / "metrics.jsonl"):
            if self._last_step < values["step"] <= done:
                self._send(values | evaluations.get(values["step"], {}))

    def _hand_over(self, step: int) -> None:
        while self._held and self._held[0].step <= step:
            values = {name: value for name, value in vars(self._held.pop(0)).items() if value is not None}
            if values["step"] > self._last_step:
                self._send(values | self._evaluations.pop(values["step"], {}))

    def _send(self, values: Mapping[str, Any]) -> None:
        self._last_step = int(values["step"])
        self._run.log(flat(values), step=self._last_step)

    def _add_report(self) -> None:
        """The page of `toolkit report`, as an artifact of the run."""
        import wandb

        from toolkit.reports.reader import read_run
        from toolkit.reports.run_page import render

        page = self._directory / "report.html"
        try:
            page.write_text(render([read_run(self._directory)], self._hidden), encoding="utf-8")
        except ToolkitError as error:
            self._say(f"no report was uploaded to W&B: {error}")
            return
        artifact = wandb.Artifact(f"report-{self._id}", type="report")
        artifact.add_file(str(page), name="report.html")
        self._run.log_artifact(artifact)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under names with slashes, as W&B groups charts."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in ("sample_ids", "router_load"):  # names, and a table per step: they are in metrics.jsonl
            continue
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            found |= flat({str(place): item for place, item in enumerate(value)}, f"{prefix}{name}/")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _evaluation(record: Mapping[str, Any]) -> dict[str, Any]:
    """Values of an evaluation under W&B's names; generated texts become a table."""
    found = {f"eval/{name}": value for name, value in record.items() if name not in ("step", "samples")}
    if record.get("samples"):
        import wandb

        rows = [[sample["prompt"], sample["text"]] for sample in record["samples"]]
        found["eval/samples"] = wandb.Table(columns=["prompt", "text"], data=rows)
    return found


def _own_id(path: Path) -> str:
    """The W&B id of this run directory, made at the first start."""
    if not path.exists():
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


# Reader of offline .wandb files (leveldb log blocks), for the last step that a crashed run had written. wandb 0.31 has
# no public reader; wandb.beta.LocalApi (pull request 12745, open) would replace it.
BLOCK_BYTES = 32 * 1024
HEADER_BYTES = 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def messages(path: Path) -> Iterator[bytes]:
    """Every complete record; a record that a crash cut short ends the file."""
    raw = path.read_bytes()
    place, parts = HEADER_BYTES if raw[:4] == b":W&B" else len(raw), b""
    while place + HEADER_BYTES <= len(raw):
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < HEADER_BYTES:  # too short for a header: filled with zeros
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", raw[place : place + HEADER_BYTES])
        data = raw[place + HEADER_BYTES : place + HEADER_BYTES + length]
        place += HEADER_BYTES + length
        if kind not in (FULL, FIRST, MIDDLE, LAST) or len(data) < length:
            return
        parts = data if kind in (FULL, FIRST) else parts + data
        if kind in (FULL, LAST):
            yield parts


def records(path: Path) -> Iterator[Any]:
    """Records of an offline file, as W&B's protobuf messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    for message in messages(path):
        yield Record.FromString(message)


def history(path: Path) -> Iterator[dict[str, Any]]:
    """What was logged: one mapping per step; nested keys are joined by dots."""
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            yield {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}


def files(directory: Path, run_id: str) -> list[Path]:
    """Files of a run in a run directory, oldest first."""
    return sorted(directory.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb"), key=lambda path: path.stat().st_mtime_ns)


def last_step(directory: Path, run_id: str) -> int:
    """Newest step that a run's files hold; 0: none."""
    for path in reversed(files(directory, run_id)):
        steps = [int(point["_step"]) for point in history(path) if "_step" in point]
        if steps:
            return max(steps)
    return 0
