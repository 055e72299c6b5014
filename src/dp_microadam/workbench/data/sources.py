"""Loads data sets by name, splits them into training, validation and test part, and checks them for their owner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dp_microadam.errors import InputError
from dp_microadam.validation import refuse_unknown, require_integer
from dp_microadam.workbench.data.catalogue import KnownData, find, known, takes_columns
from dp_microadam.workbench.data.columns import Columns
from dp_microadam.workbench.data.dataset import (
    Found,
    LabelledData,
    Source,
    UserIds,
    count_users,
    size_of,
    split,
    split_by_user,
)
from dp_microadam.workbench.data.images import ImageFolder
from dp_microadam.workbench.data.rows import Problems, Refusal
from dp_microadam.workbench.data.tables import files_of

_TEST_FRACTION, _TEST_SEED = 0.2, 0
"""The test part of data that come without one. Fixed, so that it does not depend on the split into training and validation."""


def load(
    name: str,
    folder: str | None = None,
    *,
    validation_fraction: float = 0.1,
    validation_size: int | None = None,
    train_size: int | None = None,
    test_size: int | None = None,
    split_seed: int = 0,
    image_size: int | None = None,
    verify: bool = True,
    columns: Mapping[str, Mapping[str, Any]] | None = None,
    encode: Callable[[Sequence[str]], Tensor] | None = None,
    labelled: bool = True,
    problems: Problems | None = None,
    **options: Any,
) -> LabelledData:
    """Load the data set called ``name`` from ``folder``, or from the default folders.

    The validation part is ``validation_fraction`` of the published training part, which may be 0, or ``validation_size``
    examples of it. If the options say whose each example is, it is a fraction or number of users, with all they have. The
    test part is the published one, or a fifth set aside, and does not depend on ``split_seed``. Of training and test part,
    ``train_size`` and ``test_size`` examples are taken at random, by ``split_seed``, if these are given. With ``verify``, files
    whose digests differ from the published ones are refused. Images are resized to ``image_size``. ``columns`` declares the
    columns of a table as ``[columns]`` of a recipe does; ``options`` are those in the catalogue. Texts become tokens
    [N, length] by ``encode``; labels of texts are not read unless ``labelled``.

    Raises:
        InputError: if the name is unknown, or its files are missing, damaged or not the published ones. The message holds
            nothing private; ``problems``, if given, has all that is wrong with the files and where, for their owner.
    """
    data = known(name)
    refuse_unknown(f"data set {name}", options, data.options)
    if image_size is not None:
        require_integer("image_size", image_size, 1)
    if columns and not takes_columns(name):
        raise InputError(f"columns are declared, but data is {name!r}; they are for 'table' and 'adult', leave them out")
    for option in ("mean", "std"):
        if columns and option in options:
            raise InputError(f"data_options.{option} is {options[option]!r}, but [columns] gives ranges; leave one of them out")
    if data.kind == "text" and encode is None:
        raise InputError(f"data is {name!r}, which are texts; encode must be given, which turns them into tokens")
    problems = Problems() if problems is None else problems
    declared = Columns.of(columns) if columns else None
    found = _read(Source(name, data, find(name, folder), options, declared, image_size, encode, labelled, verify, problems))
    whole, tested = found.train, found.train if found.test is None else found.test
    if found.test is None:
        rows, test_rows = _split(whole.users, len(whole), _TEST_FRACTION, _TEST_SEED)
    else:
        rows, test_rows = np.arange(len(whole)), np.arange(len(tested))
    users = _of(whole.users, rows)
    if train_size is not None and users is not None:
        raise InputError(f"train_size is {train_size}, but {name} says whose each example is; leave it out")
    training, validation = _split(users, len(rows), validation_fraction, split_seed, validation_size, train_size)
    if test_size is not None:
        if require_integer("test_size", test_size, 1) > len(test_rows):
            raise InputError(f"test_size is {test_size}; there are {len(test_rows)} test examples, take at most these")
        test_rows = test_rows[np.random.default_rng(split_seed).permutation(len(test_rows))[:test_size]]
    train = whole.part(rows[training])
    shape = tuple(train[0].shape[1:]) if isinstance(train, tuple) else whole.shape
    if len(shape) == 3 and image_size is not None:
        shape = (shape[0], image_size, image_size)
    mean, std = _constants(data, options, shape[0])
    return LabelledData(
        name,
        found.classes if isinstance(found.classes, int) else len(found.classes),
        shape,
        mean,
        std,
        train=train.protected() if isinstance(train, ImageFolder) else train,
        validation=whole.part(rows[validation]),
        test=tested.part(test_rows),
        train_users=_of(users, training),
        validation_users=_of(users, validation),
        test_users=_of(tested.users, test_rows),
        tokens=data.kind == "text",
        classes=() if isinstance(found.classes, int) else tuple(found.classes),
        raw=found.raw,
        notes=found.notes,
    )


def _read(source: Source) -> Found:
    module, _, function = source.data.reader.partition(".")
    found: Found = getattr(import_module(f"{__package__}.{module}"), function)(source)
    return found


def _of(users: UserIds | None, rows: NDArray[np.int64]) -> UserIds | None:
    return None if users is None else users[rows]


def _split(
    users: UserIds | None, count: int, fraction: float, seed: int, size: int | None = None, train_size: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if users is None:
        parts = split(count, fraction, seed, size=size, train_size=train_size)
    else:
        parts = split_by_user(users, fraction, seed, size=size)
    return parts[0].numpy(), parts[1].numpy()


def _constants(data: KnownData, options: Mapping[str, Any], count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation for normalization: those given, else the published ones, else none."""
    found = []
    for name, published_ones in (("mean", data.mean), ("std", data.std)):
        given = options.get(name, published_ones)
        numbers = given if isinstance(given, list | tuple) else [given]
        if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
            raise InputError(f"data_options.{name} is {given!r}; it must be a list of numbers")
        if len(numbers) not in (0, count):
            raise InputError(
                f"data_options.{name} has {len(numbers)} numbers; there must be {count}, one per channel or column"
            )
        found.append(tuple(float(number) for number in numbers))
    if any(not number > 0 for number in found[1]):
        raise InputError(f"data_options.std is {options['std']!r}; its numbers must be above 0")
    return found[0], found[1]


@dataclass(frozen=True)
class State:
    """A data set on this machine.

    ``state`` is ``"verified"`` (all digests match the published ones), ``"unverified"`` (present, but without published
    digests), ``"damaged"``, ``"missing"``, or ``"yours"`` for names that stand for the user's own files.
    """

    name: str
    state: str
    place: str | None = None
    problems: tuple[str, ...] = ()
    summary: tuple[str, ...] = ()
    """What data in order hold."""


def inspect(name: str, folder: str | None = None) -> State:
    """Whether a data set is here, and whether its files are the published ones. Image files are listed but not decoded."""
    data = known(name)
    if data.num_classes is None and not folder:
        return State(name, "yours")

    def look(source: Source) -> tuple[str, ...]:
        (files_of if data.kind in ("table", "text") else _read)(source)
        return ()

    return _state(name, folder, look)


def check(
    name: str,
    folder: str | None = None,
    *,
    workers: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    unit_name: str = "user",
    further: Callable[[LabelledData], object] = lambda data: None,
    **options: Any,
) -> State:
    """Check all of a data set for its owner: everything that training would refuse, and where.

    ``options`` are those of :func:`load`; ``further`` is what training does next, and may refuse. Every image is decoded, by
    ``workers`` processes; ``progress`` gets the number of those done and of all.

    Formal guarantees: unless an image cannot be decoded, there are problems exactly if training refuses the data.
    """

    def look(source: Source) -> tuple[str, ...]:
        data = load(name, folder, problems=source.problems, encode=lambda texts: torch.zeros(len(texts), 1), **options)
        further(data)
        parts = [part for part in (data.train, data.validation, data.test) if isinstance(part, ImageFolder)]
        total, done = sum(map(len, parts)), 0
        for part in parts:
            for problem in DataLoader(_Readable(part), batch_size=None, num_workers=workers):
                done += 1
                progress(done, total)
                if problem:
                    source.problems.add_error(InputError(problem))
        source.problems.refuse()
        return _summary(data, unit_name)

    return _state(name, folder, look, verify=options.get("verify", True))


def _state(name: str, folder: str | None, look: Callable[[Source], tuple[str, ...]], verify: bool = True) -> State:
    """What ``look`` finds wrong with the data, or says of them."""
    data = known(name)
    try:
        source = Source(name, data, find(name, folder), verify=verify)
    except InputError as error:
        return State(name, "missing", problems=(str(error),))
    try:
        summary = look(source)
    except InputError as error:
        found = [*source.problems.sentences(), *([] if isinstance(error, Refusal) else [str(error)])]
        return State(name, "damaged", str(source.place), tuple(found))
    verified = (data.digests and verify) or data.package
    return State(name, "verified" if verified else "unverified", str(source.place), (), summary)


def _summary(data: LabelledData, unit_name: str) -> tuple[str, ...]:
    parts = ((data.train, data.train_users), (data.validation, data.validation_users), (data.test, data.test_users))
    counts = [f"{size_of(part):,} examples" if ids is None else f"{count_users(ids):,} {unit_name}s" for part, ids in parts]
    shown = ", ".join(data.classes[:10]) + (", …" if len(data.classes) > 10 else "")
    divided = f"{counts[0]} to train on, {counts[1]} held out, and {counts[2]} to test on"
    return f"{data.num_classes} classes: {shown}", divided, *data.notes


class _Readable(Dataset[str]):
    """The error message of each image for the owner of the data; empty if it can be decoded."""

    def __init__(self, part: ImageFolder) -> None:
        self._part = part.part(np.arange(len(part)))  # which says what its images are called

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, index: int) -> str:
        try:
            self._part[index]
        except InputError as error:
            return str(error)
        return ""
