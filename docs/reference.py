"""The Python reference: tables of names in ``api.md``, which read well in the repository.

A row has the file that a name is in, and the first sentence of its docstring. On the site
the whole documentation follows each table. ``python docs/reference.py`` writes rows anew,
and makes one of each line ``::: dp_microadam.module.Name``.
"""

import ast
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("api.md")
ROW = re.compile(r"^\| \[`(\w+)`\]\(\.\./src/([\w/]+)\.py\) \| (.*)\|$", re.MULTILINE)
_ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([\w.]+)`")


def first_sentence(file: Path, name: str) -> str:
    """The first sentence that a module says about a class, a function or a value of it."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return _first(ast.get_docstring(node) or "")
        targets = node.targets if isinstance(node, ast.Assign) else []
        if [name] == [target.id for target in targets if isinstance(target, ast.Name)]:
            assert isinstance(following, ast.Expr), f"{name} of {file} has no docstring"
            return _first(str(ast.literal_eval(following.value)))
    raise LookupError(f"{file} has no {name}")


def _first(docstring: str) -> str:
    """The first sentence on one line, in Markdown.

    >>> _first("Like :class:`~torch.nn.Linear`,\\nbut ``clipped``. More.")
    'Like `Linear`, but `clipped`.'
    """
    text = " ".join(docstring.split("\n\n")[0].split())
    text = _ROLE.sub(lambda found: f"`{found.group(1).rpartition('.')[2]}`", text)
    text = text.replace("``", "`").replace("|", "\\|")
    return re.split(r"(?<=\.) (?=[A-Z`])", text)[0].removesuffix(":")


def with_current_sentences(page: str) -> str:
    """The page with the first sentence of each docstring as it is now."""
    page = re.sub(r"^::: ([\w.]+)\.(\w+)$", _new_row, page, flags=re.MULTILINE)
    page = re.sub(
        r"(?<=\|)\n\n+(?=\| \[`)", "\n", page
    )  # it belongs to the table before it

    def row(found: re.Match[str]) -> str:
        name, module, _ = found.groups()
        sentence = first_sentence(PAGE.parents[1] / f"src/{module}.py", name)
        return f"| [`{name}`](../src/{module}.py) | {sentence} |"

    return ROW.sub(row, page)


def _new_row(found: re.Match[str]) -> str:
    return f"| [`{found[2]}`](../src/{found[1].replace('.', '/')}.py) | |"


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Called by mkdocs for each page: adds the documentation below the tables."""
    if page.file.src_uri != PAGE.name:
        return markdown
    lines: list[str] = []
    waiting: list[str] = []
    for line in [*markdown.splitlines(), ""]:
        found = ROW.match(line)
        if found:
            dotted = f"{found[2].replace('/', '.')}.{found[1]}"
            waiting.append(f"\n::: {dotted}\n")
            lines.append(f"| [`{found[1]}`][{dotted}] | {found[3]} |")
            continue
        if waiting and not line.startswith("|"):
            lines += waiting
            waiting = []
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    written = with_current_sentences(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(written, encoding="utf-8")
