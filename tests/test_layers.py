"""Who may import whom, and who may read the environment: the table of docs/architecture.md, enforced."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BASE = {"errors", "resources", "secrets", "units", "verdicts"}
HEAVY = {"torch", "deepspeed", "transformers", "accelerate", "wandb", "datasets", "peft", "safetensors"}
PURE_LIBRARIES = set(sys.stdlib_module_names) | {"yaml", "toolkit", "strategies"}
RUNTIME_NEVER = {"strategies", "planner", "sessions", "commands", "roots"}
ENTERED_IN_PROCESS = {"worker.py", "preload.py"}
"""Roots that run inside a worker: they may import torch at module level."""


@dataclass(frozen=True)
class Row:
    """One package of the table."""

    libraries: str
    may_import: frozenset[str]


@dataclass(frozen=True)
class Import:
    """One import statement."""

    source: Path
    target: str
    """Dotted name of a module of ours, or of a library."""
    lazy: bool
    """Inside a function."""


def table(text: str | None = None) -> dict[str, Row]:
    rows = {}
    for line in (text or PAGE.read_text()).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[2] in ("pure", "front", "runtime"):
            rows[cells[0].strip("`")] = Row(cells[2], frozenset(re.findall(r"`([\w.]+)`", cells[3])))
    return rows


TABLE = table()


def sources(root: Path = ROOT) -> list[Path]:
    return sorted(path for folder in ("toolkit", "strategies") for path in (root / folder).rglob("*.py"))


def module_of(path: Path, root: Path = ROOT) -> str:
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    return name.removesuffix(".__init__")


def package_of(module: str, root: Path = ROOT) -> str:
    """The row of the table that a module of ours belongs to."""
    parts = module.split(".")
    if parts[0] == "strategies":
        return "strategies"
    folder = root.joinpath(*parts)
    inside = parts[1:] if folder.is_dir() else parts[1:-1]
    if inside:
        return ".".join(inside)
    return "base" if parts[-1] in BASE else "roots"


def imports(path: Path, modules: set[str]) -> Iterator[Import]:
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        lazy = id(node) not in top
        if isinstance(node, ast.Import):
            yield from (Import(path, alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield Import(path, inner if inner in modules else str(node.module), lazy)


def graph(root: Path = ROOT) -> list[Import]:
    modules = {module_of(path, root) for path in sources(root)}
    return [found for path in sources(root) for found in imports(path, modules)]


def is_ours(name: str) -> bool:
    return name.split(".")[0] in ("toolkit", "strategies")


def against_the_table(found: list[Import], rows: dict[str, Row], root: Path = ROOT) -> list[str]:
    """Imports that the table does not allow, as `file imports file`."""
    wrong = []
    for one in found:
        source = package_of(module_of(one.source, root), root)
        shown = f"{one.source.relative_to(root)} imports {one.target}"
        if is_ours(one.target):
            target = package_of(one.target, root)
            if target not in (source, "base") and (source == "base" or target not in rows[source].may_import):
                wrong.append(f"{shown}: {source} may not import {target}")
            continue
        library, kind = one.target.split(".")[0], "pure" if source == "base" else rows[source].libraries
        if kind == "pure" and (library in HEAVY or (not one.lazy and library not in PURE_LIBRARIES)):
            wrong.append(f"{shown}: {source} is pure")
        if kind == "front" and not one.lazy and library in HEAVY and one.source.name not in ENTERED_IN_PROCESS:
            wrong.append(f"{shown}: {source} imports it inside functions only")
    return wrong


def cycles(found: list[Import], root: Path = ROOT) -> list[str]:
    """Modules that import one another, directly or through others."""
    edges: dict[str, set[str]] = {}
    for one in found:
        source = module_of(one.source, root)
        if is_ours(one.target) and one.target != source:
            edges.setdefault(source, set()).add(one.target)
    done: set[str] = set()
    wrong: list[str] = []

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if module in trail:
            wrong.append(" -> ".join((*trail[trail.index(module) :], module)))
        elif module not in done:
            for target in sorted(edges.get(module, ())):
                visit(target, (*trail, module))
            done.add(module)

    for module in sorted(edges):
        visit(module, ())
    return wrong


def reads_environment(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") for node in nodes)


def test_every_package_is_in_the_table_and_nothing_else_is() -> None:
    found = {package_of(module_of(path)) for path in sources() if path.read_text().strip()}
    assert found - {"base"} == TABLE.keys()


def test_the_table_is_acyclic_and_keeps_the_halves_apart() -> None:
    left = dict(TABLE)
    while left:
        ready = [name for name, row in left.items() if not row.may_import & left.keys()]
        assert ready, f"packages import one another in a circle: {sorted(left)}"
        for name in ready:
            del left[name]
    for name, row in TABLE.items():
        assert row.may_import <= TABLE.keys(), f"{name} may import what is not in the table"
        if row.libraries == "runtime":
            assert not row.may_import & RUNTIME_NEVER, f"{name} must not know the planning half"
        if row.libraries == "pure":
            assert all(TABLE[other].libraries == "pure" for other in row.may_import), f"{name} would not be pure"


def test_imports_follow_the_table() -> None:
    assert against_the_table(graph(), TABLE) == []


def test_no_module_imports_itself_through_others() -> None:
    assert cycles(graph()) == []


def test_environment_is_read_in_the_listed_places_only() -> None:
    paragraph = PAGE.read_text().partition("`os.environ` is read in")[2].partition("only.")[0]
    listed = {f"toolkit/{name}" for name in re.findall(r"`([\w/]+\.py)`", paragraph)}
    assert {str(path.relative_to(ROOT)) for path in sources() if reads_environment(path)} == listed


def test_every_package_says_what_it_holds() -> None:
    for path in sources():
        if path.name == "__init__.py" and path.parent != ROOT / "toolkit":
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert 0 < len(docstring.splitlines()) <= 5, f"{path} needs a docstring of one to five lines"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("toolkit/cost/planted.py", "import torch", "cost is pure"),
        ("toolkit/cost/planted.py", "def f():\n    import torch", "cost is pure"),
        ("toolkit/cost/planted.py", "import numpy", "cost is pure"),
        ("toolkit/recipe/planted.py", "from toolkit.plans.plan import Plan", "recipe may not import plans"),
        ("toolkit/recipe/planted.py", "def f():\n    from toolkit.planner import search", "may not import planner"),
        ("toolkit/runtime/engine/planted.py", "import strategies", "runtime.engine may not import strategies"),
        ("toolkit/commands/planted.py", "import torch", "commands imports it inside functions only"),
        ("toolkit/errors.py", "from toolkit.recipe.schema import show", "base may not import recipe"),
    ],
)
def test_the_guard_finds_what_is_planted(tmp_path: Path, name: str, text: str, message: str) -> None:
    """The two files are named."""
    plant(tmp_path, name, text)
    (found,) = against_the_table(graph(tmp_path), TABLE, tmp_path)
    assert found.startswith(f"{name} imports")
    assert message in found


def test_the_guard_finds_a_cycle(tmp_path: Path) -> None:
    plant(tmp_path, "toolkit/cost/one.py", "def f():\n    from toolkit.cost import two")
    plant(tmp_path, "toolkit/cost/two.py", "from toolkit.cost.one import f")
    assert cycles(graph(tmp_path), tmp_path) == ["toolkit.cost.one -> toolkit.cost.two -> toolkit.cost.one"]


def plant(root: Path, name: str, text: str) -> None:
    """A tree with the folders of ours and one file."""
    for path in sources():
        (root / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
    for module in re.findall(r"from (toolkit[\w.]+) import", text):
        target = root / f"{module.replace('.', '/')}.py"
        if not target.with_suffix("").is_dir():
            target.touch()
    (root / name).write_text(text)


def test_plan_leaves_torch_alone() -> None:
    code = (
        "import sys; from toolkit.cli import main; code = main(['plan', 'recipes/demo.yaml', '--json']);"
        "heavy = sorted({'torch', 'deepspeed', 'transformers', 'accelerate', 'wandb', 'numpy'} & set(sys.modules));"
        "print(heavy, file=sys.stderr); sys.exit(code or bool(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
