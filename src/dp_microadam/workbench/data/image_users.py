"""Whose each image file is: by a CSV file of files and users, or by a pattern on the file names."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.users import UserIds, as_ids

COLUMNS = ("file", "user")


@dataclass(frozen=True)
class ImageUsers:
    """The users of image files, as ``data_options`` of a recipe describe them.

    ``table`` has the user of each file, by its path within the data folder, such as ``train/CLASS/one.jpg``. Without a table,
    ``pattern`` is matched with the whole name of a file, and its one group is the user.
    """

    source: str
    pattern: re.Pattern[str] | None = None
    table: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """What is wrong with the table itself; for the owner of the data."""

    @classmethod
    def of(cls, folder: Path, options: Mapping[str, Any]) -> ImageUsers | None:
        """What ``user_table`` or ``user_pattern`` say; None if neither is given. A relative table is looked for in ``folder``.

        Raises:
            InputError: if both are given, the table cannot be read, or the pattern cannot be used.
        """
        table, pattern = options.get("user_table"), options.get("user_pattern")
        if table is None and pattern is None:
            return None
        if table is not None and pattern is not None:
            raise InputError(
                f"data_options has user_table = {table!r} and user_pattern = {pattern!r}; it must have one of them"
            )
        for name in ("user_table", "user_pattern"):
            if name in options and not (isinstance(options[name], str) and options[name]):
                raise InputError(f"data_options.{name} is {options[name]!r}; it must be a string")
        if pattern is not None:
            return cls(f"user_pattern '{pattern}'", pattern=_compiled(pattern))
        place = folder / Path(str(table)).expanduser()
        found, problems = _read_table(place)
        return cls(str(place), table=found, problems=problems)

    def of_files(self, files: Iterable[bytes]) -> UserIds:
        """The user of each file, by its path within the data folder; empty where there is none."""
        return as_ids(np.array([self._user_of(os.fsdecode(bytes(file))) for file in files], dtype=np.str_))

    def unused(self, files: Iterable[bytes]) -> Iterator[str]:
        """The files in the table that are not among these."""
        yield from sorted(self.table.keys() - {os.fsdecode(bytes(file)) for file in files})

    def _user_of(self, file: str) -> str:
        if self.pattern is None:
            return self.table.get(file, "")
        found = self.pattern.fullmatch(file.rpartition("/")[2])
        return (found[1] or "") if found else ""


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise InputError(f"data_options.user_pattern is {pattern!r}; it must be a regular expression ({error})") from None
    if found.groups != 1:
        raise InputError(
            f"data_options.user_pattern is {pattern!r} with {found.groups} groups; it must have one group (…), the user, and "
            "match the whole file name"
        )
    return found


def _read_table(place: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    users: dict[str, str] = {}
    problems: list[str] = []
    try:
        with place.open(newline="", encoding="utf-8-sig") as stream:
            rows = csv.reader(stream)
            header = [name.strip() for name in next(rows, [])]
            if any(header.count(name) != 1 for name in COLUMNS):
                raise InputError(f"{place} must have one column 'file' and one column 'user'; its first line must name them")
            file_at, user_at = (header.index(name) for name in COLUMNS)
            for row in rows:
                if len(row) != len(header):
                    if row:
                        problems.append(f"{place} line {rows.line_num} has {len(row)} columns; it must have {len(header)}")
                    continue
                file, user = os.path.normpath(row[file_at].strip()), row[user_at].strip()
                if users.get(file, user) != user:
                    problems.append(f"{place} line {rows.line_num} gives {file} another user than before; it must have one")
                users[file] = user
    except OSError as error:
        raise InputError(f"{place} cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error):
        raise InputError(f"{place} is not a CSV file in UTF-8; it must have the columns 'file' and 'user'") from None
    return users, tuple(problems)
