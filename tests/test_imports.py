"""Imports point one way, so that each room can be read, tested and used without those that use it."""

import ast
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "dp_microadam"

ROW = (
    {"errors"},
    {"validation"},
    {"layers"},
    {"clipping", "privacy", "optimizers", "models", "data"},
    {"training"},
    {"methods", "integrations"},
    {"recipes", "reporting"},
    {"audit", "experiments", "theory"},
    {"commands"},
    {"cli"},
    {"__main__"},
)
"""Rooms from the ground up; a module imports from floors below its own, never from its own floor's other rooms."""

FLOOR = {room: floor for floor, rooms in enumerate(ROW) for room in rooms}
EXCEPTIONS = {"commands/completion.py": "cli"}  # completion asks the parser what there is to complete

WITHOUT_TORCH = (
    "privacy/plan.py",
    "privacy/accounting.py",
    "privacy/privacy_loss.py",
    "theory/bounds.py",
    "recipes/recipe.py",
    "recipes/vocabulary.py",
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


def room_of(path: Path) -> str:
    inside = path.relative_to(SOURCES)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def test_every_room_has_its_place():
    rooms = {room_of(path) for path in SOURCES.rglob("*.py")} - {"__init__"}
    assert rooms <= FLOOR.keys(), "a new room; say in ROW from where it may be imported"


def test_no_arrow_is_turned_around():
    wrong = []
    for path in sorted(SOURCES.rglob("*.py")):
        room = room_of(path)
        if room == "__init__":
            continue  # the front door shows every room
        for name in sorted(imports_of(path)):
            package, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if package != "dp_microadam" or other in ("", "__version__", room):
                continue
            place = path.relative_to(SOURCES).as_posix()
            if FLOOR[other] >= FLOOR[room] and EXCEPTIONS.get(place) != other:
                wrong.append(f"{place} imports {other}")
    assert not wrong


def test_modules_that_answer_without_torch_do_not_import_it():
    for name in WITHOUT_TORCH:
        assert not {module for module in imports_of(SOURCES / name) if module.partition(".")[0] == "torch"}, name


def test_relative_imports_are_not_used():
    for path in SOURCES.rglob("*.py"):
        levels = [node.level for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
        assert not any(levels), path
