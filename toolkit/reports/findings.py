"""Findings of the machine checks in the terminal."""

from __future__ import annotations

from rich.console import Console

from toolkit.launching.machine_checks import Finding

COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


def show(findings: list[Finding], console: Console) -> None:
    """One line a finding, and its fix."""
    for finding in findings:
        console.print(f"[{COLOURS[finding.level]}]{finding.level:8}[/]", end="")
        console.print(f"{finding.check}: {finding.what}", markup=False, highlight=False, soft_wrap=True)
        if finding.fix:
            console.print(f"        fix: {finding.fix}", markup=False, highlight=False, soft_wrap=True)
