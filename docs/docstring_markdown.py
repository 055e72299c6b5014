"""Docstrings as Markdown, for the reference: roles become code, doctests blocks of it."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([\w.]+)`")
_DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


def as_markdown(docstring: str) -> str:
    """The docstring with the last part of each name it refers to, and its examples fenced.

    >>> as_markdown("as :class:`~dp_microadam.errors.InputError` says")
    'as `InputError` says'
    """
    docstring = _ROLE.sub(lambda found: f"`{found.group(1).rpartition('.')[2]}`", docstring)
    return _DOCTEST.sub(lambda found: f"```pycon\n{found.group()}\n```", docstring)


class MarkdownDocstrings(griffe.Extension):
    """Rewrites every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
