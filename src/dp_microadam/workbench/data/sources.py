"""Loads data sets by name and splits them into training, validation and test part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.training.raw_inputs import RawInput, RawTensor
from dp_microadam.validation import refuse_unknown, require_integer, require_positive
from dp_microadam.workbench.data import adult, cifar, idx, images, places, table, text
from dp_microadam.workbench.data.arrays import Arrays
from dp_microadam.workbench.data.catalogue import KnownData, known, takes_columns
from dp_microadam.workbench.data.columns import Columns
from dp_microadam.workbench.data.contents import MEMORY_GIB, Reading
from dp_microadam.workbench.data.csv_rows import Layout
from dp_microadam.workbench.data.dataset import TEST_FRACTION, TEST_SEED, LabelledData, some_rows, split
from dp_microadam.workbench.data.image_decoding import BIT_DEPTHS
from dp_microadam.workbench.data.image_users import ImageUsers
from dp_microadam.workbench.data.raw_images import RawImages
from dp_microadam.workbench.data.raw_rows import RawRows
from dp_microadam.workbench.data.raw_table import RawTable
from dp_microadam.workbench.data.users import UserIds, refuse_shared_users, split_by_user


def read_packaged(data: KnownData) -> tuple[Arrays, Arrays]:
    """Read the training and the test part of a data set that comes with a pip package."""
    module, _, function = data.reader.partition(":")
    parts: tuple[Arrays, Arrays] = getattr(import_module(module), function)()
    return parts


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
    memory_gib: float = MEMORY_GIB,
    columns: Mapping[str, Mapping[str, Any]] | None = None,
    encode: Callable[[Sequence[str]], Tensor] | None = None,
    labelled: bool = True,
    **options: Any,
) -> LabelledData:
    """Load the data set called ``name`` from ``folder``, or from the default folders.

    The validation part is ``validation_fraction`` of the published training part, which may be 0, or ``validation_size``
    examples of it. If the options say whose each example is, it is a fraction or number of users, with all they have. The
    test part is the published one and does not depend on ``split_seed``. Of training and test part, ``train_size`` and
    ``test_size`` examples are taken at random, by ``split_seed``, if these are given. With ``verify``, files whose digests
    differ from the published ones are refused. Files larger than ``memory_gib`` are memory-mapped. Images are resized to
    ``image_size``. ``columns`` declares the columns of a table as ``[columns]`` of a recipe does; ``options`` are those in the
    catalogue. Texts become tokens [N, length] by ``encode``; labels of texts are not read unless ``labelled``.

    Raises:
        InputError: if the name is unknown, or its files are missing, damaged or not the published ones.
    """
    data = known(name)
    refuse_unknown(f"data set {name}", options, data.options)
    if image_size is not None:
        require_integer("image_size", image_size, 1)
    declared = declared_columns(name, columns, options)

    def divided(count: int, users: UserIds | None) -> tuple[Tensor, Tensor]:
        if users is None:
            return split(count, validation_fraction, split_seed, size=validation_size, train_size=train_size)
        if train_size is not None:
            raise InputError(f"train_size is {train_size}, but {name} says whose each example is; leave it out")
        return split_by_user(users, validation_fraction, split_seed, size=validation_size)

    def tested(count: int) -> Tensor:
        return some_rows(count, test_size, split_seed)

    if data.kind == "images":
        place, size = places.find(name, data, folder), image_size or images.SIZE
        return _load_images(name, data, place, size, verify, divided, tested, options)
    map_above = int(require_positive("data_memory_gib", memory_gib) * 2**30)
    reading = Reading(name, dict(data.digests) if verify else {}, map_above)
    if data.kind == "text":
        if encode is None:
            raise InputError(f"data is {name!r}, which are texts; encode must be given, which turns them into tokens")
        of_texts = text_columns(data, options, labelled=labelled)
        parts = text.read(places.find(name, data, folder), reading, of_texts)
        return _load_texts(name, parts, encode, of_texts, divided, tested)
    train, test, num_classes = _read_arrays(name, data, folder, reading, declared, options)
    refuse_shared_users(train.users, test.users, name)
    training, validation = divided(len(train), train.users)
    rows = tested(len(test))
    shape = train.inputs[0].shape[1:]
    if len(shape) == 3 and image_size is not None:
        shape = (shape[0], image_size, image_size)
    mean, std = _constants(data, options, shape[0])
    return LabelledData(
        name,
        num_classes,
        shape,
        mean,
        std,
        train=train.part(training),
        validation=train.part(validation),
        test=test.part(rows),
        test_users=_of_rows(test.users, rows),
        classes=_class_names(data, options, num_classes),
        raw=_raw_arrays(data, folder, declared, options, train),
        **_users_of_parts(train.users, training, validation),
    )


def _class_names(data: KnownData, options: Mapping[str, Any], count: int) -> tuple[str, ...]:
    given = options.get("classes")
    if isinstance(given, list | tuple):
        return tuple(given)
    return data.classes if len(data.classes) == count else ()


def _raw_arrays(
    data: KnownData, folder: str | None, columns: Columns | None, options: Mapping[str, Any], arrays: Arrays
) -> RawInput:
    """What a deployed model takes: an image or a row as the arrays hold it; a row of a CSV file by the names of its columns."""
    shape = arrays.inputs[0].shape[1:]
    if len(shape) == 3:
        return RawImages(shape[0], shape[1:])
    if columns is not None:
        return RawTable(columns.declared, adult.HEADER if data.kind == "adult" else tuple(options.get("header", ())))
    names = table.columns_of(Path(folder).expanduser(), table_layout(columns, options)) if folder else ()
    return RawRows(names) if names else RawTensor(shape, "float32")


def _read_arrays(
    name: str, data: KnownData, folder: str | None, reading: Reading, columns: Columns | None, options: Mapping[str, Any]
) -> tuple[Arrays, Arrays, int]:
    if data.package:
        if folder:
            raise InputError(f"data_folder is {folder!r}; {name} come with a Python package and are not read from a folder")
        assert data.num_classes is not None, "the catalogue knows how many classes packaged data have"
        return *read_packaged(data), data.num_classes
    place = places.find(name, data, folder)
    if data.kind == "cifar":
        return *cifar.read(name, place, reading, **options), cifar.num_classes(name, **options)
    if data.kind == "idx":
        return *idx.read_folder(place, reading), 10
    if data.kind == "adult":
        parts = []
        for part, problems in adult.read(place, reading, columns):
            problems.refuse()
            parts.append(part)
        return parts[0], parts[1], len(adult.CLASSES)
    layout = table_layout(columns, options)
    return *table.read(place, reading, layout), layout.classes if isinstance(layout.classes, int) else len(layout.classes)


def declared_columns(name: str, columns: Mapping[str, Mapping[str, Any]] | None, options: Mapping[str, Any]) -> Columns | None:
    """The declared columns of a table; None if there are none.

    Raises:
        InputError: for declarations that cannot be used, or data that has no columns.
    """
    if not columns:
        return None
    if not takes_columns(name):
        raise InputError(f"columns are declared, but data is {name!r}; they are for 'table' and 'adult', leave them out")
    for option in ("mean", "std"):
        if option in options:
            raise InputError(f"data_options.{option} is {options[option]!r}, but [columns] gives ranges; leave one of them out")
    return Columns.of(columns)


def table_layout(columns: Columns | None, options: Mapping[str, Any]) -> Layout:
    """What the options of a recipe say about a table.

    Raises:
        InputError: for an option that cannot be used.
    """
    header = options.get("header")
    if header is not None and (not isinstance(header, list | tuple) or not all(isinstance(name, str) for name in header)):
        raise InputError(f"data_options.header is {header!r}; it must be a list with the name of each column")
    label, user = options.get("label", "label"), table_user(options)
    for key, name in (("label", label), ("user_column", user)):
        if columns is not None and name in columns.columns:
            raise InputError(f"columns.{name} is declared, but data_options.{key} is the same column; leave one of them out")
    names = None if header is None else tuple(name.strip() for name in header)
    return Layout(label, _classes(options.get("classes")), user, columns, names)


def text_columns(data: KnownData, options: Mapping[str, Any], *, labelled: bool = True) -> text.Columns:
    """The columns of texts that a recipe's ``options`` name, and the classes: those of the data set, or those given."""
    names = {"text": options.get("text", "text"), "user_column": options.get("user_column")}
    if labelled:
        names["label"] = options.get("label", "label")
    for option, name in names.items():
        if name is not None and (not isinstance(name, str) or not name or list(names.values()).count(name) > 1):
            raise InputError(f"data_options.{option} is {name!r}; it must be the name of a column, another for each")
    classes = text.class_names(data.classes or _classes(options.get("classes"))) if labelled else ()
    return text.Columns(names["text"], names.get("label"), names["user_column"], classes)


def _load_texts(
    name: str,
    parts: tuple[text.Texts, text.Texts],
    encode: Callable[[Sequence[str]], Tensor],
    columns: text.Columns,
    divided: Any,
    tested: Any,
) -> LabelledData:
    def encoded(part: text.Texts, rows: Tensor) -> tuple[Tensor, Tensor]:
        chosen = part.part(rows.numpy())
        return encode(chosen.texts), torch.from_numpy(chosen.labels)

    training, validation = divided(len(parts[0].texts), parts[0].users)
    rows = tested(len(parts[1].texts))
    train = encoded(parts[0], training)
    return LabelledData(
        name,
        max(1, len(columns.classes)),
        tuple(train[0].shape[1:]),
        (),
        (),
        train=train,
        validation=encoded(parts[0], validation),
        test=encoded(parts[1], rows),
        test_users=_of_rows(parts[1].users, rows),
        tokens=True,
        classes=tuple(columns.classes),
        **_users_of_parts(parts[0].users, training, validation),
    )


def table_user(options: Mapping[str, Any]) -> str | None:
    """The name of a table's column of users, if there is one."""
    user = options.get("user_column")
    if user is not None and (not isinstance(user, str) or not user or user == options.get("label", "label")):
        raise InputError(f"data_options.user_column is {user!r}; it must be the name of a column other than the label's")
    return user


def _load_images(
    name: str, data: KnownData, folder: Path, size: int, verify: bool, divided: Any, tested: Any, options: Mapping[str, Any]
) -> LabelledData:
    users = ImageUsers.of(folder, options)
    bit_depth = bit_depth_of(options)
    found = images.read_folder(folder, size, data.num_classes if verify else None, bit_depth)
    train, test = found.train, found.test
    train_users = None if users is None else _users_of_images(users, train)
    notes = found.notes
    if test is None:
        train, test, train_users, test_users = _test_part_of(train, train_users)
        divided_by = "" if users is None else ", divided by whose images they are,"
        notes += (f"{folder} has no test part of its own: a fifth of it{divided_by} is set aside for tests, and not protected",)
    else:
        test_users = None if users is None else _users_of_images(users, test, may_lack_all=True)
    refuse_shared_users(train_users, test_users, str(folder))
    training, validation = divided(len(train), train_users)
    rows = tested(len(test))
    mean, std = _constants(data, options, 3)
    return LabelledData(
        name,
        len(found.classes),
        (3, size, size),
        mean,
        std,
        train=train.part(training).protected(),
        validation=train.part(validation),
        test=test.part(rows),
        test_users=_of_rows(test_users, rows),
        classes=found.classes,
        raw=RawImages.of_any_size(size, bit_depth),
        notes=notes,
        **_users_of_parts(train_users, training, validation),
    )


def _test_part_of(
    whole: images.ImageFolder, users: UserIds | None
) -> tuple[images.ImageFolder, images.ImageFolder, UserIds | None, UserIds | None]:
    """Training and test part, and the users of both: a fifth of the images of a folder without parts, or of their users."""
    if users is None:
        training, test = split(len(whole), TEST_FRACTION, TEST_SEED)
        return whole.part(training), whole.part(test), None, None
    training, test = split_by_user(users, TEST_FRACTION, TEST_SEED)
    return whole.part(training), whole.part(test), users[training.numpy()], users[test.numpy()]


def bit_depth_of(options: Mapping[str, Any]) -> int:
    """The bit depth of 16-bit grey values: as declared, else 16."""
    return require_integer("data_options.bit_depth", options.get("bit_depth", 16), BIT_DEPTHS.start, BIT_DEPTHS.stop - 1)


def _users_of_images(users: ImageUsers, part: images.ImageFolder, *, may_lack_all: bool = False) -> UserIds | None:
    """The user of each image of one part; None for a test part of which nothing is said."""
    if users.problems:
        raise InputError(f"{users.source} has lines that cannot be used; find them with dp-microadam data check RECIPE")
    found = users.of_files(part.example_ids())
    if may_lack_all and (found == "").all():
        return None
    if (found == "").any():
        raise InputError(
            f"{part.place} has images without a user by {users.source}; every image must have one, find them with "
            "dp-microadam data check RECIPE"
        )
    return found


def _of_rows(users: UserIds | None, rows: Tensor) -> UserIds | None:
    return None if users is None else users[rows.numpy()]


def _users_of_parts(users: UserIds | None, training: Tensor, validation: Tensor) -> dict[str, Any]:
    if users is None:
        return {}
    return {
        "train_users": users[training.numpy()],
        "validation_users": users[validation.numpy()],
        "held_out_rows": validation,
    }


def _classes(given: Any) -> int | Sequence[str]:
    if isinstance(given, list | tuple) and len(set(given)) == len(given) > 1 and all(isinstance(name, str) for name in given):
        return given
    if given is None or isinstance(given, list | tuple | str):
        raise InputError(
            f"data_options.classes is {given!r}; it must be the number of classes or a list of their names; they are public "
            "and are never taken from the data"
        )
    return require_integer("data_options.classes", given, 2)


def _constants(data: KnownData, options: Mapping[str, Any], count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation for normalization: those given, else the published ones, else none."""
    found = []
    for name, published in (("mean", data.mean), ("std", data.std)):
        given = options.get(name, published)
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
