"""Who may import whom, and who may read the environment: the table of docs/architecture.md."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"torch", "deepspeed", "transformers", "accelerate", "wandb", "datasets", "peft", "numpy", "safetensors"}
ROOTS = {"cli", "api", "live_curve", "worker", "resolve", "parity", "generate", "__init__"}
PURE_LIBRARIES = set(sys.stdlib_module_names) | {"yaml", "toolkit"}
STRATEGY_IMPORTS = {"toolkit.plans"}
MAY_READ_ENVIRON = {
    "toolkit/worker.py",
    "toolkit/launching/launchers.py",
    "toolkit/clusters/reader.py",
    "toolkit/runtime/supervision/warm_pool.py",
    "toolkit/runtime/supervision/call_on_ranks.py",
}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path, *, nested: bool) -> Iterator[str]:
    """Modules that a file imports; at module level only, or anywhere."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if nested else iter(tree.body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def pure_modules() -> list[Path]:
    return [p for p in sorted((ROOT / "toolkit").glob("*.py")) if p.stem not in ROOTS]


@pytest.mark.parametrize("path", pure_modules(), ids=lambda p: p.stem)
def test_pure_layer_needs_standard_library_and_yaml_only(path: Path) -> None:
    for name in imports(path, nested=False):
        assert name.split(".")[0] in PURE_LIBRARIES, f"{path.name} imports {name}"
        assert not name.startswith("toolkit.runtime"), f"{path.name} imports {name}"
        assert name.split(".")[0] != "strategies", f"{path.name} imports {name}"


@pytest.mark.parametrize("path", sources("strategies"), ids=lambda p: p.stem)
def test_strategies_know_plan_and_compat_only(path: Path) -> None:
    for name in imports(path, nested=True):
        if name.startswith("toolkit"):
            assert any(name == ok or name.startswith(ok + ".") for ok in STRATEGY_IMPORTS), f"{path.name}: {name}"
            assert not name.startswith("toolkit.runtime")
        assert name.split(".")[0] not in HEAVY


@pytest.mark.parametrize("path", sources("toolkit/runtime"), ids=lambda p: p.stem)
def test_runtime_knows_neither_registry_nor_planner(path: Path) -> None:
    for name in imports(path, nested=True):
        assert name.split(".")[0] != "strategies", f"{path.name} imports {name}"
        assert not name.startswith("toolkit.planner.search"), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", [*sources("toolkit/commands"), ROOT / "toolkit/cli.py"], ids=lambda p: p.stem)
def test_commands_import_the_runtime_lazily(path: Path) -> None:
    for name in imports(path, nested=False):
        assert name.split(".")[0] not in HEAVY, f"{path.name} imports {name}"
        assert not name.startswith("toolkit.runtime"), f"{path.name} imports {name}"


def test_environment_is_read_in_few_places() -> None:
    readers = {str(path.relative_to(ROOT)) for path in sources("toolkit", "strategies") if reads_environment(path)}
    assert readers <= MAY_READ_ENVIRON


def reads_environment(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") for node in nodes)


def test_plan_leaves_torch_alone() -> None:
    code = (
        "import sys; from toolkit.cli import main; code = main(['plan', 'recipes/demo.yaml', '--json']);"
        "heavy = sorted({'torch', 'deepspeed', 'transformers', 'accelerate', 'wandb', 'numpy'} & set(sys.modules));"
        "print(heavy, file=sys.stderr); sys.exit(code or bool(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
