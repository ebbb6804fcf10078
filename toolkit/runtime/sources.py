"""Where documents come from: local files, Hugging Face data sets, the machine's own Python sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from toolkit.data_files import TABLE_FORMATS, data_files
from toolkit.errors import BadInput
from toolkit.recipe import Data


def read_documents(section: Data) -> Iterator[str]:
    """Every document's text, in a fixed order."""
    files = data_files(section.path)
    if files is None:
        yield from _hub(section)
        return
    for path in files:
        if path.suffix in TABLE_FORMATS:
            yield from _table(path, section.text_column)
        else:
            yield path.read_text(encoding="utf-8", errors="replace")


def _table(path: Path, column: str) -> Iterator[str]:
    import datasets

    kind = TABLE_FORMATS[path.suffix]
    try:
        if kind == "arrow":
            rows = datasets.Dataset.from_file(str(path))
        else:
            rows = datasets.load_dataset(kind, data_files=str(path), split="train")
    except Exception as error:  # datasets raises its readers' own errors: of pandas, pyarrow, json
        raise BadInput("data.path", f"{path} can't be read as {kind}: {_deepest(error)}") from None
    yield from _column(rows, column, str(path))


def _hub(section: Data) -> Iterator[str]:
    import datasets

    try:
        rows = datasets.load_dataset(section.path, split="train")
    except Exception as error:  # network, permissions, missing: each library its own class
        raise BadInput(
            "data.path", f"{section.path} is no local file and can't be loaded from the hub: {_deepest(error)}"
        ) from None
    yield from _column(rows, section.text_column, section.path)


def _column(rows: object, column: str, source: str) -> Iterator[str]:
    names = getattr(rows, "column_names", [])
    if column not in names:
        raise BadInput("data.text_column", f"{source} has no column {column!r}; it has {', '.join(names)}")
    for text in rows[column]:  # type: ignore[index]
        if text:
            yield str(text)


def _deepest(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
