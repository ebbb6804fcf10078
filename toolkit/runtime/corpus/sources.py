"""Sources of rows: local files, Hugging Face data sets, synthetic rows."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.errors import BadInput, first_line
from toolkit.recipe.data_checks import ITEMS
from toolkit.recipe.data_files import TABLE_FORMATS, data_files
from toolkit.recipe.sections import Data

BLOCK_BYTES = 1 << 20
NOT_UTF8 = "not UTF-8; convert the file (iconv -t UTF-8), or remove the line"
TOO_DEEP = "nested too deeply; correct or remove it"


def content_key(section: Data, path: str) -> str:
    """A key that changes when the content of a source changes."""
    if path == "synthetic":
        return f"synthetic {section.format} {_num_items(section) or ''}".rstrip()
    files = data_files(path)
    if files is None:
        return f"hub {path} {_hub(path)._fingerprint}"
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        with file.open("rb") as stream:
            digest.update(f"{file.suffix}\0{file.stat().st_size}\0".encode())
            while block := stream.read(BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def read_rows(section: Data, path: str, work: Path) -> Any:
    """The rows of a source as a `datasets.Dataset`; temporary files go into `work`."""
    import datasets

    if path == "synthetic":
        items = _num_items(section)
        return datasets.Dataset.from_list(synthetic_sessions(items) if items else synthetic_rows(section.format))
    files = data_files(path)
    if files is None:
        return _hub(path)
    tables = {kind: [f for f in files if TABLE_FORMATS.get(f.suffix) == kind] for kind in TABLE_FORMATS.values()}
    found = [_table(kind, group, work) for kind, group in tables.items() if group]
    texts = [file for file in files if file.suffix not in TABLE_FORMATS]
    if texts:
        if section.format != "text":
            raise BadInput("data.path", f"{texts[0]} is plain text, without columns; {section.format} needs a table")
        found.append(_texts(texts, section.text_column, work))
    return found[0] if len(found) == 1 else _joined(found, section)


def need_columns(rows: Any, columns: Sequence[str], source: str) -> None:
    """`BadInput`, with the columns that exist, if a column is missing."""
    missing = [column for column in columns if column not in rows.column_names]
    if missing:
        raise BadInput(
            "data",
            f"{source} has no column {missing[0]!r}; it has {', '.join(rows.column_names)}; "
            "name the right one with the keys data.…_column",
        )


def _texts(files: list[Path], column: str, work: Path) -> Any:
    """One document per file."""
    import datasets

    def documents(paths: list[str]) -> Iterator[dict[str, str]]:
        for path in paths:
            yield {column: read_document(Path(path))}

    names = [str(file) for file in files]
    if sum(file.stat().st_size for file in files) < 1 << 28:
        return datasets.Dataset.from_list(list(documents(names)))
    return datasets.Dataset.from_generator(documents, gen_kwargs={"paths": names}, cache_dir=str(work))


def _table(kind: str, files: list[Path], work: Path) -> Any:
    import datasets

    names = [str(file) for file in files]
    for file in files:
        check_json(file)
    try:
        if kind == "arrow":
            return datasets.concatenate_datasets([datasets.Dataset.from_file(name) for name in names])
        return datasets.load_dataset(kind, data_files=names, split="train", cache_dir=str(work))
    except Exception as error:  # datasets raises errors of its readers: pandas, pyarrow, json
        where = names[0] if len(names) == 1 else f"{names[0]} … ({len(names)} files)"
        raise BadInput("data.path", f"{where} can't be read as {kind}: {deepest(error)}") from None


def read_document(file: Path) -> str:
    """The text of a file; `BadInput` with the line if it is not UTF-8. Python files may declare other encodings."""
    data = file.read_bytes()
    try:
        return data.decode("utf-8", "replace" if file.suffix == ".py" else "strict")
    except UnicodeDecodeError as error:
        raise BadInput("data.path", f"{_line(file, data, error)}: {NOT_UTF8}") from None


def check_json(file: Path) -> None:
    """`BadInput` with the first line of a JSON file that is not a JSON object in UTF-8.

    Python's parser has to accept what pyarrow will read: that one (26.0.1) ends the process with SIGSEGV when a line
    has 100,000 nested brackets. Other formats are left alone.
    """
    if file.suffix == ".jsonl":
        with file.open("rb") as lines:
            for count, line in enumerate(lines, 1):
                _check_row(f"{file}, line {count}", line)
    elif file.suffix == ".json":
        data = file.read_bytes()
        try:
            json.loads(data)
        except RecursionError:
            raise BadInput("data.path", f"{file}: {TOO_DEEP}") from None
        except UnicodeDecodeError as error:
            raise BadInput("data.path", f"{_line(file, data, error)}: {NOT_UTF8}") from None
        except ValueError:  # one object per line, or broken
            for count, line in enumerate(data.splitlines(), 1):
                _check_row(f"{file}, line {count}", line)


def _check_row(where: str, line: bytes) -> None:
    try:
        if line.strip() and not isinstance(json.loads(line.decode("utf-8")), dict):
            raise BadInput("data.path", f"{where}: one JSON object per line is required")
    except UnicodeDecodeError:
        raise BadInput("data.path", f"{where}: {NOT_UTF8}") from None
    except RecursionError:
        raise BadInput("data.path", f"{where}: {TOO_DEEP}") from None
    except json.JSONDecodeError as error:
        what = f"{error.msg} at column {error.colno}; correct or remove the line"
        raise BadInput("data.path", f"{where} can't be read as JSON: {what}") from None


def _line(file: Path, data: bytes, error: UnicodeDecodeError) -> str:
    count = data.count(b"\n", 0, error.start) + 1
    return f"{file}, line {count}"


def _joined(found: list[Any], section: Data) -> Any:
    import datasets

    shared = set(found[0].column_names).intersection(*(rows.column_names for rows in found))
    need_columns(found[0].select_columns(sorted(shared)), (section.text_column,), "some of the files")
    return datasets.concatenate_datasets([rows.select_columns(sorted(shared)) for rows in found])


def _hub(path: str) -> Any:
    import datasets

    name, _, part = path.partition(":")
    try:
        return datasets.load_dataset(name, part or None, split="train")
    except Exception as error:  # network, permissions, missing files: each library has its own class
        raise BadInput(
            "data.path", f"{path} is not a local file and can't be loaded from the hub: {deepest(error)}"
        ) from None


def deepest(error: BaseException) -> str:
    """The first line of the error at the end of the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


COUNT = 256
ANIMALS = ("cat", "dog", "owl", "fox")
SOUNDS = ("meow", "woof", "hoot", "yip")


def synthetic_rows(kind: str, count: int = COUNT) -> list[dict[str, Any]]:
    """Synthetic rows of a format, with the default column names."""
    return [_ROWS[kind](number) for number in range(count)]


def _text(number: int) -> dict[str, Any]:
    animal = number % len(ANIMALS)
    return {"text": f"The {ANIMALS[animal]} says {SOUNDS[animal]}. " * (1 + number % 5)}


def _pair(number: int) -> dict[str, Any]:
    animal = number % len(ANIMALS)
    answer = f"{SOUNDS[animal]} " * (1 + number % 3)
    return {"prompt": f"{number}: what does the {ANIMALS[animal]} say?", "response": answer}


def _chat(number: int) -> dict[str, Any]:
    messages = []
    for turn in range(1 + number % 3):
        row = _pair(number + turn)
        messages += [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
    return {"messages": messages}


def _preference(number: int) -> dict[str, Any]:
    """The right sound against that of another animal."""
    row = _pair(number)
    wrong = SOUNDS[(number + 1 + number // len(ANIMALS) % (len(SOUNDS) - 1)) % len(SOUNDS)]
    rejected = f"{wrong} " * (1 + number % 3)
    return {"prompt": row["prompt"], "chosen": row["response"], "rejected": rejected}


def _query(number: int) -> dict[str, Any]:
    """A question, its answer, and the sounds of other animals."""
    animal = number % len(ANIMALS)
    others = [f"{number % 16}: {SOUNDS[(animal + step) % len(SOUNDS)]}" for step in (1, 2, 3)]
    query = f"{number % 16}: what does the {ANIMALS[animal]} say?"
    return {"query": query, "positive": f"{number % 16}: {SOUNDS[animal]}", "negatives": others}


def _ranking(number: int) -> dict[str, Any]:
    row = _query(number)
    candidates = [*row["negatives"], row["positive"]]
    place = number % len(candidates)
    shown = candidates[place:] + candidates[:place]
    return {"query": row["query"], "candidates": shown, "scores": [float(text == row["positive"]) for text in shown]}


SESSIONS, SHELF = 8192, 16
"""Synthetic sessions, and items that are bought together."""


def _num_items(section: Data) -> int:
    """Items of a recommender's data; 0 if rows are texts."""
    name = section.tokenizer or ""
    return int(name.removeprefix(ITEMS)) if name.startswith(ITEMS) else 0


def synthetic_sessions(items: int, count: int = SESSIONS) -> list[dict[str, Any]]:
    """Sessions of item ids with the next item of each: mostly the one after the last, on a shelf that some like more.

    Some shelves are visited much more often than others, so popular items alone are right now and then.
    """
    random = np.random.default_rng(0)
    shelves = max(1, items // SHELF)
    weights = 1 / np.arange(1, shelves + 1)
    rows = []
    for shelf in random.choice(shelves, count, p=weights / weights.sum()).tolist():
        size = min(SHELF, items)
        place = int(random.integers(size))
        session = []
        for _ in range(int(random.integers(2, 8))):
            session.append(shelf * SHELF + place)
            place = (place + 1) % size if random.random() < 0.7 else int(random.integers(size))
        rows.append({"query": session, "positive": [shelf * SHELF + place], "negatives": []})
    return rows


def _class(number: int) -> dict[str, Any]:
    return {"text": _text(number)["text"], "label": number % len(ANIMALS)}


def _image(number: int) -> dict[str, Any]:
    """A noisy square in one of four colours."""
    from PIL import Image

    colours = np.random.default_rng(number).integers(0, 60, (16, 16, 3), dtype=np.uint8)
    kind = number % len(ANIMALS)
    colours[..., kind % 3] += np.uint8(60 if kind < 3 else 180)
    stream = io.BytesIO()
    Image.fromarray(colours).save(stream, "png")
    return {"image": {"bytes": stream.getvalue(), "path": None}, "label": number % len(ANIMALS)}


_ROWS = {
    "image-classification": _image,
    "text": _text,
    "instruction": _pair,
    "seq2seq": _pair,
    "chat": _chat,
    "preference": _preference,
    "pairs": _query,
    "ranking": _ranking,
    "classification": _class,
}
