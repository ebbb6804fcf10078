"""Checkpoint format: the files, the index of parameter fragments, and the manifest with a checksum of every file.

    step-00000100/
        manifest.json              size and SHA-256 of every other file, and its own digest
        index.json                 which elements of which parameter are in which file
        state.json                 step, samples, counters, versions
        recipe.yaml, plan.json     inputs of the run
        rank-00000-0.safetensors   fp32 masters and moments that rank 0 holds, and its random generators

No file contains executable code, and no name in a file can point outside the directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoints import element_runs
from toolkit.checkpoints.element_runs import Region
from toolkit.errors import BadInput, Problem
from toolkit.units import GIB, MIB
from toolkit.verdicts import installed

FORMAT = "toolkit-checkpoint-1"
MANIFEST, INDEX, STATE = "manifest.json", "index.json", "state.json"
HASH_CHUNK_BYTES = 4 * MIB
LARGEST_JSON_BYTES = GIB
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of a file in the manifest."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class FragmentEntry:
    """Elements of a parameter in one file, with every kind of state stored for them."""

    file: str
    """Name of a safetensors file in the checkpoint."""
    key: str
    """Prefix of the tensor names `key:kind` in that file."""
    kinds: tuple[str, ...]
    """`weight` (the fp32 master), the optimizer's states such as `exp_avg`, or `buffer`."""
    region: Region
    """The elements, in the order of the stored tensors."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter under its Hugging Face name."""

    shape: tuple[int, ...]
    pieces: tuple[FragmentEntry, ...]

    def kinds(self) -> set[str]:
        """Every kind of state that is stored for the parameter."""
        return {kind for piece in self.pieces for kind in piece.kinds}


Index = dict[str, Parameter]


def tensor_key(key: str, kind: str) -> str:
    """Name of a tensor in a safetensors file."""
    return f"{key}:{kind}"


def dump_index(index: Mapping[str, Parameter]) -> bytes:
    """The bytes of index.json."""
    parameters = {
        name: {
            "shape": list(parameter.shape),
            "pieces": [
                {"file": p.file, "key": p.key, "kinds": list(p.kinds), "runs": element_runs.to_json(p.region)}
                for p in parameter.pieces
            ],
        }
        for name, parameter in sorted(index.items())
    }
    return canonical_json({"format": FORMAT, "parameters": parameters})


def parse_index(data: bytes, files: Mapping[str, FileEntry]) -> Index:
    """The index; raises `BadInput` if it is malformed, names a file outside `files`, or misses elements."""
    try:
        given = strict_json(data)
        if given["format"] != FORMAT:
            raise ValueError(f"format {given['format']!r}; this version reads {FORMAT}")
        index = {name: _parameter(entry, files) for name, entry in given["parameters"].items()}
        for name, parameter in index.items():
            _check_sizes(name, parameter, files)
            _check_cover(name, parameter)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(INDEX, f"is not a valid index: {error!s:.300}") from None
    return index


def _parameter(entry: Mapping[str, Any], files: Mapping[str, FileEntry]) -> Parameter:
    shape = tuple(entry["shape"])
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"shape {shape!r}")
    return Parameter(shape=shape, pieces=tuple(_piece(piece, files) for piece in entry["pieces"]))


def _piece(given: Mapping[str, Any], files: Mapping[str, FileEntry]) -> FragmentEntry:
    if given["file"] not in files:
        raise ValueError(f"{given['file']!r} is not a file in the manifest")
    kinds = tuple(given["kinds"])
    if not isinstance(given["key"], str) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError("key and kinds are not text")
    return FragmentEntry(
        file=given["file"], key=given["key"], kinds=kinds, region=element_runs.from_json(given["runs"])
    )


def _check_sizes(name: str, parameter: Parameter, files: Mapping[str, FileEntry]) -> None:
    """Raise `ValueError` if a file is too small for the elements that it is said to hold, a byte each at least."""
    for piece in parameter.pieces:
        claimed = element_runs.size(piece.region)
        if claimed > files[piece.file].bytes:
            raise ValueError(f"{name}: {claimed} elements in {piece.file}, which has {files[piece.file].bytes} bytes")


def _check_cover(name: str, parameter: Parameter) -> None:
    numel = 1
    for n in parameter.shape:
        numel *= n
    for kind in sorted(parameter.kinds()):
        problem = element_runs.cover([p.region for p in parameter.pieces if kind in p.kinds], numel)
        if problem:
            raise ValueError(f"{name} ({kind}): {problem}")


def parse_state(data: bytes, step: int) -> dict[str, Any]:
    """The contents of state.json; raises `BadInput` unless it is the state of a run after `step`, the manifest's."""
    try:
        state = strict_json(data)
        missing = [key for key in ("step", "samples", "optimizer", "data", "counters") if key not in state]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        counters = state["counters"]
        counts = {"step": state["step"], "samples": state["samples"], "optimizer_steps": counters["optimizer_steps"]}
        for key, value in counts.items():
            if type(value) is not int or value < 0:
                raise ValueError(f"{key} is {value!r}; a number from 0 is required")
        if state["step"] != step:
            raise ValueError(f"it is of step {state['step']}; the manifest is of step {step}")
        if not isinstance(state["optimizer"], str) or not isinstance(state["data"], dict):
            raise ValueError("optimizer is not text, or data is not a mapping")
        wrong = [key for key, value in counters.items() if type(value) not in (int, float) or not _is_finite(value)]
        if wrong:
            raise ValueError(f"counter {wrong[0]} is not a finite number")
    except KeyError as error:
        raise BadInput(STATE, f"is not the state of a run: {error!s:.200} is missing") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(STATE, f"is not the state of a run: {error!s:.200}") from None
    return dict(state)


def _is_finite(value: float) -> bool:
    return abs(value) <= sys.float_info.max


def strict_json(data: bytes) -> Any:
    """Parse JSON; raises `ValueError` for NaN and Infinity, too, which Python reads and JSON does not have."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not a number of JSON")

    return json.loads(data, parse_constant=refuse)


def read_contents(directory: Path) -> tuple[Index, dict[str, Any]]:
    """Index and state of a checkpoint, as `verify`, `resume` and `export` read them; raises `BadInput`."""
    files, step = read_manifest(directory)
    state = parse_state(read_small(directory / STATE), step)
    return parse_index(read_small(directory / INDEX), files), state


def content_problems(directory: Path) -> list[Problem]:
    """Problems with what index and state say, in a checkpoint whose bytes are as they were written."""
    try:
        read_contents(directory)
    except BadInput as error:
        return list(error.problems)
    return []


def dump_manifest(files: Mapping[str, FileEntry], step: int) -> bytes:
    """The bytes of manifest.json, in canonical form with their own digest, so that any changed bit is detected."""
    body = {
        "format": FORMAT,
        "step": step,
        "files": {name: {"bytes": e.bytes, "sha256": e.sha256} for name, e in sorted(files.items())},
    }
    return canonical_json({**body, "digest": hashlib.sha256(canonical_json(body)).hexdigest()})


def parse_manifest(data: bytes) -> tuple[dict[str, FileEntry], int]:
    """Files and step; raises `BadInput` if a byte differs from what was written."""
    try:
        given = strict_json(data)
        files = {name: FileEntry(int(e["bytes"]), str(e["sha256"])) for name, e in given["files"].items()}
        step = int(given["step"])
        if step < 0 or any(entry.bytes < 0 for entry in files.values()):
            raise ValueError("a number below 0")
        intact = dump_manifest(files, step) == data
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(MANIFEST, f"is damaged: {error!s:.200}") from None
    if not intact:
        raise BadInput(MANIFEST, "is damaged: its digest does not match its contents")
    bad = [name for name in files if not _FILE_NAME.fullmatch(name)]
    if bad:
        raise BadInput(MANIFEST, f"{bad[0]!r:.100} is not a plain file name; this was not written by the toolkit")
    return files, step


def read_manifest(directory: Path) -> tuple[dict[str, FileEntry], int]:
    """The manifest of a checkpoint directory."""
    return parse_manifest(read_small(directory / MANIFEST))


def file_problems(directory: Path, names: Sequence[str] | None = None) -> list[Problem]:
    """Problems of a checkpoint, or of the files in `names` only; empty if every byte is as written."""
    try:
        files, step = read_manifest(directory)
    except BadInput as error:
        return [Problem(MANIFEST, problem.what) for problem in error.problems]
    if names is None:
        found = list(_names_and_types(directory, files, step))
        names = list(files)
    else:
        found = [Problem(name, "is not in the manifest") for name in names if name not in files]
        names = [name for name in names if name in files]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        results = pool.map(lambda name: _file_problem(directory / name, files[name]), names)
        found.extend(Problem(name, what) for name, what in zip(names, results, strict=True) if what)
    return found


def layout_problems(directory: Path) -> list[Problem]:
    """Problems with names and types of files, found without reading the large ones."""
    try:
        return list(_names_and_types(directory, *read_manifest(directory)))
    except BadInput as error:
        return [Problem(MANIFEST, problem.what) for problem in error.problems]


def _names_and_types(directory: Path, files: Mapping[str, FileEntry], step: int) -> Iterator[Problem]:
    present = {entry.name for entry in os.scandir(directory)} - {MANIFEST}
    for name in sorted(files.keys() - present):
        yield Problem(name, "is missing")
    for name in sorted(present - files.keys()):
        yield Problem(name, "is not in the manifest; its origin is unknown")
    for name in (INDEX, STATE):
        if name not in files:
            yield Problem(name, "is not in the manifest")
    named = step_of(directory.name)
    if named is not None and named != step:
        yield Problem(MANIFEST, f"belongs to step {step}, but is in the directory of step {named}")


def _file_problem(path: Path, entry: FileEntry) -> str | None:
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return "is not a regular file; links and devices are refused"
        if status.st_size != entry.bytes:
            return f"has {status.st_size} bytes; {entry.bytes} were written"
        return None if sha256(path) == entry.sha256 else "does not have the SHA-256 that was written; its bytes changed"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"can't be read: {error.strerror}"


def sha256(path: Path) -> str:
    """SHA-256 of a file; symbolic links are refused."""
    digest = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def read_small(path: Path) -> bytes:
    """Contents of a JSON file of a checkpoint; raises `BadInput` unless it is a regular file of reasonable size."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadInput(path.name, "is not a regular file; links and devices are refused")
            data = file.read(LARGEST_JSON_BYTES + 1)
    except FileNotFoundError:
        raise BadInput(path.name, "is missing") from None
    except OSError as error:
        raise BadInput(path.name, f"can't be read: {error.strerror}; links are refused") from None
    if len(data) > LARGEST_JSON_BYTES:
        raise BadInput(path.name, f"is larger than {LARGEST_JSON_BYTES} bytes")
    return data


def directory_name(step: int) -> str:
    """Name of a checkpoint's directory."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint directory; None for other names."""
    match = re.fullmatch(r"step-(\d{8,})", name)
    return int(match[1]) if match else None


def canonical_json(value: Any) -> bytes:
    """The canonical JSON of a value: sorted keys, no spaces."""
    return (json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n").encode()


PACKAGES = ("torch", "deepspeed", "transformers", "safetensors", "numpy", "peft")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a checkpoint is written with."""
    found = zip(PACKAGES, installed(PACKAGES), strict=True)
    return {"python": platform.python_version()} | {package: version for package, version in found if version}
