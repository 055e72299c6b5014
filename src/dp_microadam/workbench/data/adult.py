"""Reader for the Adult census data (Becker and Kohavi, 1996) in the two files of the UCI repository.

They have no header, spaces after the commas, ``?`` for what is missing; the test file begins with a remark and has a full stop
after each label.
"""

from __future__ import annotations

from pathlib import Path

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.arrays import Arrays
from dp_microadam.workbench.data.columns import Columns
from dp_microadam.workbench.data.contents import Reading
from dp_microadam.workbench.data.csv_rows import CsvFile, Layout, Problems
from dp_microadam.workbench.data.table import read_csv

FILES = ("adult.data", "adult.test")
CLASSES = ("<=50K", ">50K")
HEADER = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
    "income",
)
"""Names of the columns, from adult.names."""


def files_of(folder: Path) -> list[Path]:
    """The training and the test file.

    Raises:
        InputError: if one is missing.
    """
    for name in FILES:
        if not (folder / name).is_file():
            raise InputError(f"{folder} has no file {name}; it must hold {' and '.join(FILES)}")
    return [folder / name for name in FILES]


def csv_files(folder: Path, columns: Columns | None) -> list[CsvFile]:
    """The two files and how they are read.

    Raises:
        InputError: if one is missing, or no columns are declared.
    """
    if columns is None:
        raise InputError("adult needs [columns], which say what its columns are; the recipe adult has them")
    layout = Layout("income", CLASSES, columns=columns, header=HEADER)
    return [CsvFile(path, layout, clean=_without_remark) for path in files_of(folder)]


def read(folder: Path, reading: Reading, columns: Columns | None) -> list[tuple[Arrays, Problems]]:
    """The training and the test part, with what is wrong with the cells of each.

    Raises:
        InputError: if a file is missing or not the published one.
    """
    files = csv_files(folder, columns)
    for file in files:
        reading.require_published_file(file.path)
    return [read_csv(file, reading) for file in files]


def _without_remark(line: str) -> str:
    return "\n" if line.startswith("|") else line.rstrip().removesuffix(".") + "\n"
