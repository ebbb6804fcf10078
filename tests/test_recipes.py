"""What ships works: every recipe has a plan, every make target in the README exists, a wheel contains all files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from toolkit.generate import with_prediction
from toolkit.launching import launchers
from toolkit.recipe.file import as_mapping, load_recipe, make_recipe
from toolkit.runtime.supervision.warm_pool import run_warm
from toolkit.sessions.resolve import resolve
from toolkit.sessions.tiny_recipe import tiny_recipe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_plan(path: Path) -> None:
    resolved = resolve(load_recipe(path))
    assert resolved.chosen.estimate.fits
    assert f"toolkit train recipes/{path.name}" in path.read_text().split("\nname:")[0], "the header has the command"


@pytest.mark.parametrize("path", [path for path in RECIPES if path.stem != "demo"], ids=lambda p: p.stem)
def test_headers_say_what_the_recipe_is_for_and_what_is_predicted(path: Path) -> None:
    header, body = path.read_text().split("\nname:", 1)
    for words in ("# Hardware: ", "# Run:  ", f"# Try:  toolkit train recipes/{path.name} --tiny", "# Predicted: "):
        assert words in header, words
    task, model, strategy = path.stem.split("_", 2)
    assert f"name: {strategy}" in body
    assert f"name: {task}-{model}" in f"name:{body}"
    assert with_prediction(path) == path.read_text(), "run: make generate"


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_tiny_recipes_train(path: Path, tmp_path: Path) -> None:
    """`--tiny` trains the same task and strategy with real engines on this machine."""
    recipe, tiny = load_recipe(path), tiny_recipe(load_recipe(path))
    assert make_recipe(as_mapping(tiny)) == tiny
    assert (tiny.data.format, tiny.strategy.name) == (recipe.data.format, recipe.strategy.name)
    resolved = resolve(tiny)
    run = resolved.write(tmp_path / "run")
    codes = run_warm(launchers.commands("local", run.path, resolved.chosen.plan.devices, "cpu"))
    assert not any(codes), "\n".join(log.read_text()[-3000:] for log in sorted(run.path.glob("logs/*")))
    losses = [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]
    assert len(losses) == 4
    assert all(0 < loss < 10 for loss in losses)
    assert run.evaluations.exists() == bool(recipe.train.eval_every)


def test_readme_commands_are_those_of_the_makefile() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    used = set(re.findall(r"\bmake ([a-z]+)", readme))
    assert {"demo", "test", "check"} <= used <= targets
    assert "make check test" in (ROOT / ".ci" / "run").read_text()


def test_the_recipe_of_the_readme_can_do_what_the_readme_says() -> None:
    """It has a plan for one node, where `toolkit train` starts workers, and saves checkpoints to resume and export."""
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    recipe = make_recipe(yaml.safe_load(block))
    assert resolve(recipe).chosen.estimate.fits
    assert resolve(recipe).job.cluster.nodes == 1
    assert recipe.checkpoint.every > 0


def test_readme_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_a_wheel_finds_its_recipes_and_configs(tmp_path: Path) -> None:
    site = build_and_unpack(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import toolkit;"
        f"assert toolkit.__file__.startswith({str(site)!r});"
        "from toolkit.cli import main; sys.exit(main(['plan', 'demo', 'model={path: llama-3-8b}', 'cluster=dgx-h100']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def build_and_unpack(tmp_path: Path) -> Path:
    """Build the wheel from a copy of the sources: an older build directory would hide missing files."""
    source, site = tmp_path / "source", tmp_path / "site"
    for name in ("toolkit", "strategies", "recipes", "configs"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    return site
