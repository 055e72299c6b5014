"""Reader for labelled texts: CSV files with a header, or JSON lines, one object per line.

One column holds the text and one the label; another may say whose each text is. The classes are public: they are given, never
taken from the data. Reading refuses a file with one sentence that holds nothing of it; :func:`problems` lists all that is
wrong with it by line, for the owner of the data.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.contents import Reading
from dp_microadam.workbench.data.dataset import TEST_FRACTION, TEST_SEED, split
from dp_microadam.workbench.data.users import UserIds, as_ids, refuse_shared_users, split_by_user

ENDINGS = (".csv", ".jsonl")

_LONGEST_FIELD = 2**31 - 1
"""Of a CSV file, in characters. Python's own limit is 131,072, which a long document exceeds."""


@dataclass(frozen=True)
class Columns:
    """Names of the columns. ``label`` is None for texts without labels, as language models take them."""

    text: str = "text"
    label: str | None = "label"
    user: str | None = None
    classes: Sequence[str] = ()
    """Names of the classes, in the order of their numbers; empty: labels are not looked at."""


@dataclass(frozen=True)
class Texts:
    """N texts, their labels (0 without a column of labels), and their users, if these are known."""

    texts: list[str]
    labels: NDArray[np.int64]
    users: UserIds | None

    def part(self, rows: NDArray[np.int64]) -> Texts:
        """The texts with these indices."""
        chosen = [self.texts[row] for row in rows]
        return Texts(chosen, self.labels[rows], None if self.users is None else self.users[rows])


def class_names(given: int | Sequence[str]) -> tuple[str, ...]:
    """The names of classes; a number of them stands for labels 0, 1, …"""
    return tuple(map(str, range(given))) if isinstance(given, int) else tuple(given)


def files_of(place: Path) -> list[Path]:
    """The file itself, or the training and the test file in a folder.

    Raises:
        InputError: if a folder lacks one of them, or a file is of another kind.
    """
    if place.is_file():
        if place.suffix.lower() not in ENDINGS:
            raise InputError(f"data_folder is {str(place)!r}; texts must be in a .csv or .jsonl file, or a folder of them")
        return [place]
    found = []
    for part in ("train", "test"):
        paths = [place / f"{part}{ending}" for ending in ENDINGS]
        found += [path for path in paths if path.is_file()][:1]
    if len(found) != 2:
        raise InputError(f"{place} must hold train.csv and test.csv, or train.jsonl and test.jsonl; or name a single file")
    return found


def read(place: Path, reading: Reading, columns: Columns) -> tuple[Texts, Texts]:
    """Read the training and the test part; a fifth of a single file is the test part, or of its users if they are known.

    Raises:
        InputError: naming the file, if it cannot be read or is not valid. Messages contain nothing of its content.
    """
    parts = [_read_file(path, reading, columns, may_lack_users=part > 0) for part, path in enumerate(files_of(place))]
    if len(parts) == 2:
        refuse_shared_users(parts[0].users, parts[1].users, str(place))
        return parts[0], parts[1]
    whole = parts[0]
    if whole.users is None:
        training, test = split(len(whole.texts), TEST_FRACTION, TEST_SEED)
    else:
        training, test = split_by_user(whole.users, TEST_FRACTION, TEST_SEED)
    return whole.part(training.numpy()), whole.part(test.numpy())


def problems(place: Path, reading: Reading, columns: Columns) -> Iterator[str]:
    """A sentence for everything that is wrong with the files, with its line; for the owner of the data."""
    users: list[UserIds | None] = []
    for part, path in enumerate(files_of(place)):
        try:
            content = _content(path, reading, columns, may_lack_users=part > 0)
        except InputError as error:
            yield str(error)
            continue
        for line, problem in sorted(content.problems):
            yield f"{path}, line {line}: {problem}"
        if not content.rows and not content.problems:
            yield f"{path} holds no texts; it must have at least one"
        users.append(_users_of(content))
    if len(users) == 2:
        try:
            refuse_shared_users(users[0], users[1], str(place))
        except InputError as error:
            yield str(error)


@dataclass
class _Content:
    """What a file holds: valid rows of text, label and user, and problems by line."""

    has_users: bool
    rows: list[tuple[str, int, str]] = field(default_factory=list)
    problems: list[tuple[int, str]] = field(default_factory=list)


def _read_file(path: Path, reading: Reading, columns: Columns, *, may_lack_users: bool) -> Texts:
    content = _content(path, reading, columns, may_lack_users=may_lack_users)
    if content.problems:
        raise InputError(f"{path} has lines that cannot be used; find them with dp-microadam data check RECIPE")
    if not content.rows:
        raise InputError(f"{path} holds no texts; it must have at least one")
    texts, labels, _ = zip(*content.rows, strict=True)
    return Texts(list(texts), np.array(labels, dtype=np.int64), _users_of(content))


def _users_of(content: _Content) -> UserIds | None:
    return as_ids(np.array([user for _, _, user in content.rows], dtype=np.str_)) if content.has_users else None


def _content(path: Path, reading: Reading, columns: Columns, *, may_lack_users: bool) -> _Content:
    """All rows of a file.

    Raises:
        InputError: if it cannot be read at all, or lacks a column.
    """
    try:
        if path.stat().st_size > reading.map_above:
            raise InputError(
                f"{path} is larger than data_memory_gib = {reading.map_above / 2**30:g}, and text cannot be memory-mapped; "
                "set data_memory_gib higher"
            )
        return _sorted_out(path, list(rows_of(path)), columns, may_lack_users)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None


Row = tuple[int, dict[str, Any] | str]
"""The number of a row's first line, and its values by column, or what is wrong with it as a whole."""


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of a CSV file or of JSON lines."""
    return _csv_rows(path) if path.suffix.lower() == ".csv" else _json_rows(path)


def problem_of_text(text: Any, column: str) -> str | None:
    """What is wrong with a text, or None."""
    if not isinstance(text, str):
        return f"column {column!r} holds no text"
    if not text.strip():
        return "the text is empty"
    return "the text is not valid UTF-8; save the file in that encoding" if _is_broken(text) else None


def _sorted_out(path: Path, rows: list[Row], columns: Columns, may_lack_users: bool) -> _Content:
    known = {name for _, row in rows if isinstance(row, dict) for name in row}
    user = None if may_lack_users and columns.user not in known else columns.user
    for option, name in (("text", columns.text), ("label", columns.label), ("user_column", user)):
        if name is not None and name not in known and any(isinstance(row, dict) for _, row in rows):
            raise InputError(f"{path} has no column {name!r}; data_options.{option} must name one of its columns")
    number = {name: index for index, name in enumerate(columns.classes)}
    content = _Content(has_users=user is not None)
    for line, row in rows:
        if isinstance(row, str):
            content.problems.append((line, row))
            continue
        text, label, owner = row.get(columns.text), row.get(columns.label or ""), row.get(user or "")
        found = list(_problems_of_row(text, label, owner, columns, number, user))
        content.problems += [(line, problem) for problem in found]
        if not found:
            content.rows.append((str(text), number.get(_word(label), 0), _word(owner)))
    return content


def _problems_of_row(
    text: Any, label: Any, owner: Any, columns: Columns, number: dict[str, int], user: str | None
) -> Iterator[str]:
    if (problem := problem_of_text(text, columns.text)) is not None:
        yield problem
    if columns.label is not None and columns.classes and _word(label) not in number:
        yield f"the label {_word(label)!r} is not among classes = {list(columns.classes)}"
    if user is not None and _word(owner).lower() in ("", "nan"):
        yield f"column {user!r} names no user"


def _word(value: Any) -> str:
    """A label or user as text, the way a CSV file would hold it. 3.0 is 3, so that nobody counts as two users."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value).strip()


def _is_broken(text: str) -> bool:
    """Whether bytes of the text were not UTF-8: reading keeps them as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _csv_rows(path: Path) -> Iterator[Row]:
    limit = csv.field_size_limit(_LONGEST_FIELD)
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as stream:
            reader = csv.reader(stream, strict=True)
            header: list[str] | None = None
            while True:
                line = reader.line_num + 1
                try:
                    values = next(reader)
                except StopIteration:
                    return
                except csv.Error:
                    yield line, "the quotes do not match; a text with quotes or line breaks must be quoted as a whole"
                    continue
                if header is None:
                    header = [name.strip() for name in values]
                    if len(set(header)) != len(header):
                        raise InputError(f"{path} has two columns of the same name; every column must have its own")
                elif values and len(values) != len(header):
                    yield line, f"there are {len(values)} columns, and {len(header)} in the header; quote texts with commas"
                elif values:  # a line without anything is none
                    yield line, dict(zip(header, values, strict=True))
    finally:
        csv.field_size_limit(limit)


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as stream:
        for line, raw in enumerate(stream, 1):
            if not raw.strip():
                continue
            try:
                row = json.loads(raw.decode("utf-8-sig"))
            except UnicodeDecodeError:
                yield line, "the text is not valid UTF-8; save the file in that encoding"
                continue
            except (ValueError, RecursionError):
                row = None
            yield line, row if isinstance(row, dict) else "there is no JSON object; every line must hold one"
