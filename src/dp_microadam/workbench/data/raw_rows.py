"""Rows of a CSV file as the raw input of a deployed model."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.training.raw_inputs import RawInput


@dataclass(frozen=True)
class RawRows(RawInput):
    """Rows of numbers, one per column. In a CSV file the columns are found by their names, and others are passed over."""

    columns: Sequence[str]

    kind: ClassVar[str] = "table"
    endings: ClassVar[tuple[str, ...]] = (".csv",)

    @property
    def in_words(self) -> str:
        return f"float32 tensor [B, {len(self.columns)}], the columns {', '.join(self.columns)}"

    @property
    def file_code(self) -> str:
        return (
            "import csv\n\n"
            f"columns = {list(self.columns)!r}\n"
            'with open("rows.csv", newline="") as file:\n'
            "    raw = torch.tensor([[float(row[name]) for name in columns] for row in csv.DictReader(file)])"
        )

    def module(self) -> nn.Module:
        return nn.Identity()

    def example(self) -> Tensor:
        return torch.zeros(2, len(self.columns))

    def read(self, file: Path) -> Iterator[tuple[str, Tensor]]:
        try:
            with file.open(newline="", encoding="utf-8-sig") as stream:
                rows = csv.reader(stream, skipinitialspace=True)
                header = [name.strip() for name in next(rows, [])]
                missing = [name for name in self.columns if header.count(name) != 1]
                if missing:
                    raise InputError(
                        f"{file} must have one column {missing[0]!r}, by its first line; the model was trained on it"
                    )
                places = [header.index(name) for name in self.columns]
                for number, row in enumerate((row for row in rows if row), 1):
                    yield f"{file} row {number}", self._numbers(file, number, row, places)
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror or error}") from None
        except (UnicodeDecodeError, csv.Error):
            raise InputError(f"{file} is not a CSV file in UTF-8; it must have the columns {', '.join(self.columns)}") from None

    def _numbers(self, file: Path, number: int, row: Sequence[str], places: Sequence[int]) -> Tensor:
        try:
            found = torch.tensor([[float(row[place]) for place in places]])
        except (ValueError, IndexError):
            found = torch.tensor(float("nan"))
        if not found.isfinite().all():
            raise InputError(f"{file} row {number} lacks a number; each of its columns {', '.join(self.columns)} must have one")
        return found
