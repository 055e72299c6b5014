"""Rows of text as the raw input of a deployed model: declared columns, encoded as in training."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.training.raw_inputs import RawInput
from dp_microadam.workbench.data.columns import Columns


@dataclass(frozen=True)
class RawTable(RawInput):
    """Rows of a CSV file whose columns a recipe declares. ``header`` names the columns of files that do not.

    The program takes encoded rows: what is text in a file is encoded by the declaration, which needs no other row.
    """

    columns: Mapping[str, Mapping[str, Any]]
    header: Sequence[str] = ()

    kind: ClassVar[str] = "columns"
    endings: ClassVar[tuple[str, ...]] = (".csv",)

    @property
    def in_words(self) -> str:
        return f"float32 tensor [B, {self._encoding.width}], the columns {', '.join(self._names)} encoded as declared"

    @property
    def file_code(self) -> str:
        return (
            "import csv\nimport json\n\n"
            "from dp_microadam.workbench.data.columns import Columns\n\n"
            'columns = Columns.of(json.load(open("export.json"))["input"]["columns"])\n'
            'with open("rows.csv", newline="") as file:\n'
            "    raw = torch.tensor([columns.vector(row) for row in csv.DictReader(file, skipinitialspace=True)])"
        )

    def module(self) -> nn.Module:
        return nn.Identity()

    def example(self) -> Tensor:
        return torch.zeros(2, self._encoding.width)

    def read(self, file: Path) -> Iterator[tuple[str, Tensor]]:
        try:
            with file.open(newline="", encoding="utf-8-sig") as stream:
                header: Sequence[str] | None = None
                number = 0
                for row in csv.reader(stream, skipinitialspace=True):
                    if header is None:
                        first = [name.strip() for name in row]
                        header = first if set(self._names) <= set(first) or not self.header else self.header
                        if header is first:
                            continue
                    if row:
                        number += 1
                        yield f"{file} row {number}", self._encoded(file, number, dict(zip(header, row, strict=False)))
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror or error}") from None
        except (UnicodeDecodeError, csv.Error):
            raise InputError(f"{file} is not a CSV file in UTF-8; it must have the columns {', '.join(self._names)}") from None

    @cached_property
    def _encoding(self) -> Columns:
        return Columns.of(self.columns)

    @cached_property
    def _names(self) -> list[str]:
        return [name for name, column in self._encoding.columns.items() if column.width]

    def _encoded(self, file: Path, number: int, row: Mapping[str, str]) -> Tensor:
        try:
            return torch.tensor([self._encoding.vector(row)])
        except InputError as error:
            raise InputError(f"{file} row {number}: {error}") from None
