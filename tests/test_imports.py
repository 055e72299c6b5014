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
    {"errors"},
    {"validation", "durable_files"},
    {"layers", "accounting"},
    {"plan"},
    {"noise"},
    {"sampling", "ledger", "clipping", "optimizers"},
    {"training"},
    {"methods"},
    {"integrations"},
)
"""Rooms of the library, from the ground up."""

WORKBENCH = (
    {"workbench.data", "workbench.models"},
    {"workbench.recipes", "workbench.reporting"},
    {"workbench.audit"},
    {"workbench.command_line"},
    {"__main__"},
)
"""What stands on top."""

ROW = (*LIBRARY, *WORKBENCH)
"""A module imports from floors below its own, never from its own floor's other rooms."""

FLOOR = {room: floor for floor, rooms in enumerate(ROW) for room in rooms}

WITHOUT_TORCH = (
    "durable_files.py",
    "methods/__init__.py",
    "methods/table.py",
    *(f"{room}/*.py" for room in ("accounting", "plan")),
    "workbench/recipes/recipe.py",
    "workbench/recipes/recipe_files.py",
    "workbench/recipes/keys.py",
)


def imports_of(path: Path) -> set[str]:
    """Every module that is imported anywhere in the file, inside functions and for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in ("dp_microadam", "dp_microadam.workbench"):
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def room_of(parts: Sequence[str]) -> str:
    """The room a module belongs to, by the parts of its name below the package."""
    return ".".join(parts[:2]) if parts[0] == "workbench" else parts[0]


def parts_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(SOURCES).with_suffix("").parts


def is_front_door(path: Path) -> bool:
    return parts_of(path) in (("__init__",), ("workbench", "__init__"))


def test_every_room_has_its_place():
    rooms = {room_of(parts_of(path)) for path in SOURCES.rglob("*.py") if not is_front_door(path)}
    assert rooms <= FLOOR.keys(), "a new room; say in LIBRARY or WORKBENCH from where it may be imported"


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
    """Everything below workbench/ is imported, and trains a step, from a copy in which workbench/ is missing.

    With the adapters to other libraries, importing takes most of the time.
    """
    left_out = shutil.ignore_patterns("workbench", "__main__.py", "__pycache__")
    shutil.copytree(SOURCES, tmp_path / "dp_microadam", ignore=left_out)
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
from dp_microadam import MicroAdam, PrivacyPlan, PrivateTrainer, RecordSettings
model = torch.nn.Linear(3, 1)
trainer = PrivateTrainer(model, MicroAdam(model.parameters(), fused=False), PrivacyPlan(20, 5, 1.0, 1, 1e-2),
    lambda model, batch: model(batch).sum(1), run_dir={str(tmp_path / "run")!r}, record=RecordSettings(show_progress=False))
print(trainer.fit(torch.rand(20, 3)).steps_done)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1"], done.stderr


def test_modules_that_answer_without_torch_do_not_import_it():
    for path in (path for name in WITHOUT_TORCH for path in SOURCES.glob(name)):
        assert not {module for module in imports_of(path) if module.partition(".")[0] == "torch"}, path


def test_only_the_applications_import_what_only_they_need():
    for path in sorted(SOURCES.rglob("*.py")):
        if parts_of(path)[0] != "workbench":
            assert not {module.partition(".")[0] for module in imports_of(path)} & {"tomli_w", "argcomplete"}, path


def test_relative_imports_are_not_used():
    for path in SOURCES.rglob("*.py"):
        levels = [node.level for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
        assert not any(levels), path
