"""Insert JSON data into an HTML page."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import BadInput

PAGES = Path(__file__).resolve().parent / "pages"


ELSEWHERE = "give the name of a file, in a directory that exists, on a disk with space"


def check_writable(path: Path) -> None:
    """Raise `BadInput` before any work if a page can't be written there."""
    if path.is_dir():
        raise BadInput(str(path), f"can't be written: is a directory; {ELSEWHERE}")
    if not path.parent.is_dir():
        raise BadInput(str(path), f"can't be written: no such directory; {ELSEWHERE}")
    with _refusing(path):
        if not path.exists():
            tempfile.TemporaryFile(dir=path.parent).close()
            return
        with path.open("ab") as file:  # leaves a file as it is; a device shows only when written to whether it is full
            file.write(b"" if path.is_file() else b"\n")


def write_page(path: Path, text: str) -> None:
    """Write a page; raise `BadInput` if the place can't be written to."""
    with _refusing(path):
        path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise BadInput(str(path), f"can't be written: {reason}; {ELSEWHERE}") from error


def fill(page: str, data: dict[str, Any]) -> str:
    """Return a page with its data; `<` is escaped so that no text can close the script element."""
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return (PAGES / page).read_text(encoding="utf-8").replace("__DATA__", text)
