"""Files of the applications appear whole or not at all."""

import ast
from pathlib import Path

APPS = Path(__file__).parents[2] / "src" / "dp_microadam" / "workbench"


def test_files_are_replaced_as_a_whole_by_every_writer():
    """Whoever writes goes through durable_files; what is only ever appended to, and locks, may be opened directly."""
    bypasses = []
    for path in sorted(APPS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("write_text", "write_bytes", "replace"):
                os_replace = isinstance(node.value, ast.Name) and node.value.id == "os"
                if node.attr != "replace" or os_replace:
                    bypasses.append(f"{path.name}: {node.attr}")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "savefig":
                target = node.args[0]
                if not (isinstance(target, ast.Name) and target.id == "file"):
                    bypasses.append(f"{path.name}: savefig")
    assert not bypasses
