"""Every exception says what to do next: what would be right, or the next thing to try."""

import ast
import re
from pathlib import Path

import dp_microadam

SOURCE = Path(dp_microadam.__file__).parent
OURS = {"InputError", "PrivacyError", "DPMicroAdamError", "CheckpointError", "UnreadableExample"}

# Words that tell what would be right, or what to do. A message of ours has at least one.
NEXT_STEP = re.compile(
    r"\b(must|needs?|takes?|known|nearest|allows at most|instead|again|"
    r"give|use|pass|run|call|make|install|name|put|choose|start|begin|resume|leave|set|build|wrap|freeze|unfreeze|fetch|save|write|"
    r"train|try|wait|stop|unpack|add|remove|check|keep|define|log|hold|pad|allow|record|solve|report|go on|move|read|load)\b"
)


def messages():
    """Each literal message of an exception of ours, with the place it is raised at; parts in braces are left out."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            name = getattr(node.exc.func, "id", "")
            if name in OURS and node.exc.args and (text := literal(node.exc.args[0])):
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", text, wholly_literal(node.exc.args[0])


def literal(node):
    return " ".join(part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))


def wholly_literal(node):
    """Whether only names and values are put in, and no sentence that says why, or is another error's of ours."""
    parts = [ast.unparse(part.value) for part in ast.walk(node) if isinstance(part, ast.FormattedValue)]
    sentences = {"row.remedy", "counts", "why", "wrong", "reason", "unusable", "hint", "error", "error.remedy", "remedy"}
    return not any(part in sentences or "hint" in part or "by_hand" in part or "str(error)" in part for part in parts)


def test_every_exception_names_the_next_step():
    found = list(messages())
    assert len(found) > 200  # the search itself finds them
    silent = [f"{place}: {text}" for place, text, whole in found if whole and not NEXT_STEP.search(text)]
    assert not silent, "\n".join(silent)
