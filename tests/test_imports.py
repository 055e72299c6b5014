"""Imports point one way, so that each room can be read, tested and used without those that use it."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "dp_microadam"

LIBRARY = (
    {"errors", "moved"},
    {"validation", "durable_files"},
    {"layers"},
    {"clipping", "privacy", "optimizers", "models", "data"},
    {"training"},
    {"methods", "integrations"},
)
"""Rooms of the library and of what experiments are made of, from the ground up."""

APPLICATIONS = (
    {"apps.recipes", "apps.reporting"},
    {"apps.audit", "apps.experiments", "apps.theory"},
    {"apps.command_line"},
    {"__main__"},
)
"""What stands on top."""

ROW = (*LIBRARY, *APPLICATIONS)
"""A module imports from floors below its own, never from its own floor's other rooms."""

FLOOR = {room: floor for floor, rooms in enumerate(ROW) for room in rooms}

WITHOUT_TORCH = (
    "durable_files.py",
    "methods/__init__.py",
    "methods/table.py",
    "privacy/plan.py",
    "privacy/accounting.py",
    "privacy/banded.py",
    "privacy/band_choice.py",
    "privacy/privacy_loss.py",
    "privacy/trade_off.py",
    "privacy/replacement.py",
    "privacy/meaning.py",
    "privacy/renyi.py",
    "privacy/solving.py",
    "privacy/step_loss.py",
    "privacy/dropping.py",
    "privacy/truncated.py",
    "privacy/selection.py",
    "privacy/selection_plan.py",
    "apps/theory/bounds.py",
    "apps/recipes/recipe.py",
    "apps/recipes/recipe_files.py",
    "apps/recipes/vocabulary.py",
)


def imports_of(path: Path) -> set[str]:
    """Every module that is imported anywhere in the file, inside functions and for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "dp_microadam":
            found |= {f"dp_microadam.{name.name}" for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def room_of(parts: Sequence[str]) -> str:
    """The room a module belongs to, by the parts of its name below the package."""
    return ".".join(parts[:2]) if parts[0] == "apps" else parts[0]


def parts_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(SOURCES).with_suffix("").parts


def is_front_door(path: Path) -> bool:
    return parts_of(path) in (("__init__",), ("apps", "__init__"))


def test_every_room_has_its_place():
    rooms = {room_of(parts_of(path)) for path in SOURCES.rglob("*.py") if not is_front_door(path)}
    assert rooms <= FLOOR.keys(), "a new room; say in LIBRARY or APPLICATIONS from where it may be imported"


def test_no_arrow_is_turned_around():
    wrong = []
    for path in sorted(SOURCES.rglob("*.py")):
        if is_front_door(path):
            continue
        room = room_of(parts_of(path))
        for name in sorted(imports_of(path)):
            package, *rest = name.split(".")
            if package != "dp_microadam" or rest in ([], ["__version__"]):
                continue
            other = room_of(rest)
            if other != room and FLOOR[other] >= FLOOR[room]:
                wrong.append(f"{path.relative_to(SOURCES).as_posix()} imports {other}")
    assert not wrong


@pytest.mark.parametrize("adapters", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_library_works_without_what_stands_on_top(tmp_path, adapters):
    """Everything below apps/ is imported, and trains a step, from a copy in which apps/ is missing.

    With the adapters to other libraries, importing takes most of the time.
    """
    shutil.copytree(SOURCES, tmp_path / "dp_microadam", ignore=shutil.ignore_patterns("apps", "__main__.py", "__pycache__"))
    modules = [
        ".".join(("dp_microadam", *parts_of(path))).removesuffix(".__init__")
        for path in sorted((tmp_path / "dp_microadam").rglob("*.py"), key=str)
        for path in [SOURCES / path.relative_to(tmp_path / "dp_microadam")]
        if adapters or path.stem not in ("hugging_face", "lightning", "opacus")
    ]
    code = f"""
import importlib, sys
sys.path.insert(0, {str(tmp_path)!r})
for name in {modules!r}:
    importlib.import_module(name)
import dp_microadam, torch
assert dp_microadam.__file__.startswith({str(tmp_path)!r})
from dp_microadam import MicroAdam, PrivacyPlan, PrivateTrainer
model = torch.nn.Linear(3, 1)
trainer = PrivateTrainer(model, MicroAdam(model.parameters(), fused=False), PrivacyPlan(20, 5, 1.0, 1, 1e-2),
    lambda model, batch: model(batch).sum(1), run_dir={str(tmp_path / "run")!r}, show_progress=False)
print(trainer.fit(torch.rand(20, 3)).steps_done)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1"], done.stderr


@pytest.mark.parametrize("name", ["cli", "recipes.vocabulary", "theory.bounds", "audit", "commands.plan"])
def test_modules_under_their_names_of_version_0_1_are_found_with_a_warning(name):
    code = f"import dp_microadam.{name} as found; print(found.__name__)"
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("dp_microadam.apps."), done.stderr
    assert "DeprecationWarning" in done.stderr


def test_modules_that_answer_without_torch_do_not_import_it():
    for name in WITHOUT_TORCH:
        assert not {module for module in imports_of(SOURCES / name) if module.partition(".")[0] == "torch"}, name


def test_only_the_applications_import_what_only_they_need():
    for path in sorted(SOURCES.rglob("*.py")):
        if parts_of(path)[0] != "apps":
            assert not {module.partition(".")[0] for module in imports_of(path)} & {"tomli_w", "argcomplete"}, path


def test_relative_imports_are_not_used():
    for path in SOURCES.rglob("*.py"):
        levels = [node.level for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
        assert not any(levels), path
