"""The code stays easy to navigate: bounds on packages, modules, functions; `python -m benchmarks.shape` shows them."""

from __future__ import annotations

import pytest

from benchmarks.shape import Shape, measure

MANY = {"toolkit.commands"}
"""One file per command."""


@pytest.fixture(scope="module")
def shape() -> Shape:
    """Not measured on import: every process that collects tests would parse all sources."""
    return measure()


def test_a_package_has_three_to_sixteen_modules(shape: Shape) -> None:
    counts = {package: len(modules) for package, modules in shape.modules.items() if package not in MANY}
    assert {package: count for package, count in counts.items() if not 3 <= count <= 16} == {}


def test_modules_are_neither_tiny_nor_huge(shape: Shape) -> None:
    assert {name: count for name, count in shape.lines.items() if count > 400} == {}
    assert 100 <= shape.median_lines <= 220


def test_functions_are_short_and_take_few_parameters(shape: Shape) -> None:
    assert [one for one in shape.functions if one.lines > 60 or one.parameters > 7] == []


def test_few_modules_have_a_single_importer(shape: Shape) -> None:
    assert len(shape.single_importer) <= 25, shape.single_importer
