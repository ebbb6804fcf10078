"""Write the hashes of packages of which one wheel serves all machines: `make lock`, after a change of constraints.txt.

pip itself chooses the files and reports their hashes. Packages with a wheel per platform, torch above all (its CPU and
CUDA builds share a version), are pinned in constraints.txt without a hash. No index address is written.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
EXTRAS = "dev,gpu,islands,lora,qlora,ray,report,tensorboard,vision"
HEAD = "# Made by `make lock`: wheels that serve all machines, with their hashes.\n"


def universal(target: str) -> dict[str, str]:
    """Requirement lines by package: what pip would install for the target, where the wheel serves all machines."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        options = ["--dry-run", "--ignore-installed", "-q", "--report", str(report), "-c", "constraints.txt"]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, "-e", target], cwd=HERE.parent, check=True)
        found = json.loads(report.read_text())["install"]
    lines = {}
    for each in found:
        digest = each["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest and each["download_info"]["url"].endswith("-none-any.whl"):
            name, version = each["metadata"]["name"], each["metadata"]["version"]
            lines[name.lower()] = f"{name}=={version} --hash=sha256:{digest}\n"
    return lines


def main() -> None:
    """Write one file for the demo and one for everything else."""
    demo = universal(".")
    rest = {name: line for name, line in universal(f".[{EXTRAS}]").items() if name not in demo}
    (HERE / "hashes-demo.txt").write_text(HEAD + "".join(demo[name] for name in sorted(demo)))
    (HERE / "hashes-rest.txt").write_text(HEAD + "".join(rest[name] for name in sorted(rest)))


if __name__ == "__main__":
    main()
