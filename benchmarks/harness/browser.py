"""A headless browser for tests of pages."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str:
    """Path of a browser; `make test` installs one on Debian as root."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    assert found, f"a browser is needed to test pages: install one of {', '.join(NAMES)}"
    return found


def dom(page: str, script: str, folder: Path) -> str:
    """The page's document after `script` ran in it; it fails if the page reports an error or uses the network."""
    catcher = "<script>window.onerror = m => document.documentElement.setAttribute('data-error', m);</script>"
    path = folder / "page.html"
    path.write_text(
        page.replace("<head>", f"<head>{catcher}", 1).replace("</body>", f"<script>{script}</script></body>")
    )
    command = [
        find(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=3000",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert "data-error" not in result.stdout.split(">", 2)[1], result.stdout[:300]
    return result.stdout


def screenshot(page: str, out: Path, size: tuple[int, int]) -> None:
    """A picture of a page."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(page)
        command = [
            find(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=4000", f"--screenshot={out.resolve()}",
            f"--user-data-dir={folder}/profile", path.as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=120)
