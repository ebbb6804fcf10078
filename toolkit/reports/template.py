"""Insert JSON data into an HTML page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGES = Path(__file__).resolve().parent / "pages"


def fill(page: str, data: dict[str, Any]) -> str:
    """Return a page with its data; `<` is escaped so that no text can close the script element."""
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return (PAGES / page).read_text(encoding="utf-8").replace("__DATA__", text)
