"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], *notes: str) -> None:
    """A table and the lines below it. Without names in the ``header`` all columns are on the left, else all but the first are
    on the right."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=any(header))
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number and name else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console(highlight=False)
    console.print(table)
    for note in notes:
        console.print(escape(note), soft_wrap=True)
