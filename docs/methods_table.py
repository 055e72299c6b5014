"""Puts the table of methods, as the code has it, where a page says so."""

from typing import Any

from dp_microadam.methods.table import as_markdown

MARK = "<!-- table of methods -->"


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Called by mkdocs for each page."""
    return markdown.replace(MARK, as_markdown())
