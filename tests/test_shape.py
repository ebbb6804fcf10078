"""The code stays easy to navigate: bounds on packages, modules, functions; `python -m benchmarks.shape` shows them."""

from __future__ import annotations

from benchmarks.shape import measure

SHAPE = measure()
MANY = {"toolkit.commands"}
"""One file per command."""


def test_a_package_has_three_to_sixteen_modules() -> None:
    counts = {package: len(modules) for package, modules in SHAPE.modules.items() if package not in MANY}
    assert {package: count for package, count in counts.items() if not 3 <= count <= 16} == {}


def test_modules_are_neither_tiny_nor_huge() -> None:
    assert {name: count for name, count in SHAPE.lines.items() if count > 400} == {}
    assert 100 <= SHAPE.median_lines <= 220


def test_functions_are_short_and_take_few_parameters() -> None:
    assert [one for one in SHAPE.functions if one.lines > 60 or one.parameters > 7] == []


def test_few_modules_have_a_single_importer() -> None:
    assert len(SHAPE.single_importer) <= 25, SHAPE.single_importer
