"""The shape of the code: modules per package, module sizes, longest functions, parameters, single importers.

python -m benchmarks.shape        # a table, and the figures that tests/test_shape.py holds
"""

from __future__ import annotations

import ast
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Function:
    """One function or method."""

    where: str
    lines: int
    parameters: int
    """Without `self` and `cls`."""


@dataclass(frozen=True)
class Shape:
    """What is measured of `toolkit` and `strategies`."""

    modules: dict[str, list[str]]
    """Package → its modules, without `__init__`."""
    lines: dict[str, int]
    functions: list[Function]
    importers: dict[str, set[str]]

    @property
    def single_importer(self) -> list[str]:
        """Modules that exactly one other module imports."""
        return sorted(name for name, users in self.importers.items() if len(users) == 1)

    @property
    def median_lines(self) -> float:
        """Lines of the median module."""
        return statistics.median(self.lines.values())


def measure(root: Path = ROOT) -> Shape:
    """Read every module."""
    paths = [path for folder in ("toolkit", "strategies") for path in sorted((root / folder).rglob("*.py"))]
    names = {path: _module(path, root) for path in paths}
    known = set(names.values())
    modules: dict[str, list[str]] = defaultdict(list)
    importers: dict[str, set[str]] = defaultdict(set)
    lines: dict[str, int] = {}
    functions: list[Function] = []
    for path, name in names.items():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        if path.stem != "__init__":
            modules[name.rpartition(".")[0]].append(name)
            lines[name] = text.count("\n")
        functions += _functions(tree, name)
        for target in _imported(tree, known) - {name}:
            importers[target].add(name)
    # Process entries: `toolkit = "toolkit.cli:main"` in pyproject.toml, `python -m toolkit.worker` in every launcher.
    importers["toolkit.cli"].add("the command `toolkit`")
    importers["toolkit.worker"].add("every launcher")
    return Shape(dict(modules), lines, functions, {name: importers[name] for name in lines})


def _module(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _functions(tree: ast.Module, module: str) -> list[Function]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            count = len([name for name in names if name not in ("self", "cls")])
            found.append(Function(f"{module}.{node.name}", (node.end_lineno or 0) - node.lineno + 1, count))
    return found


def _imported(tree: ast.Module, known: set[str]) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & known) or {str(node.module)}
    return found & known


def main() -> None:
    """Print the table."""
    shape = measure()
    for package, modules in sorted(shape.modules.items()):
        print(f"{package:32} {len(modules):3} modules {sum(shape.lines[name] for name in modules):6} lines")
    longest = max(shape.functions, key=lambda one: one.lines)
    widest = max(shape.functions, key=lambda one: one.parameters)
    largest, size = Counter(shape.lines).most_common(1)[0]
    print(f"longest function: {longest.lines} lines ({longest.where})")
    print(f"most parameters: {widest.parameters} ({widest.where})")
    print(f"largest module: {size} lines ({largest}); median {shape.median_lines:.0f} of {len(shape.lines)}")
    print(f"modules with a single importer: {len(shape.single_importer)}")
    for name in shape.single_importer:
        print(f"  {name} ({shape.lines[name]} lines) <- {next(iter(shape.importers[name]))}")


if __name__ == "__main__":
    main()
