"""Checks which data sets are on this machine, and whether their files are the published ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from dp_microadam.data import cifar, idx, images, places, table, text
from dp_microadam.data.catalogue import KnownData, known
from dp_microadam.data.contents import Reading
from dp_microadam.data.image_users import ImageUsers
from dp_microadam.data.sources import read_packaged, table_user, text_columns
from dp_microadam.data.users import refuse_shared_users
from dp_microadam.errors import InputError


@dataclass(frozen=True)
class Found:
    """State of a data set on this machine.

    ``state`` is ``"verified"`` (all digests match the published ones), ``"unverified"`` (present, but without published
    digests), ``"damaged"``, ``"missing"``, or ``"yours"`` for names that stand for the user's own files.
    """

    name: str
    summary: str
    state: str
    place: str | None = None
    problem: str | None = None


def inspect(name: str, folder: str | None = None) -> Found:
    """Check a data set in ``folder`` or the default folders. Image files are listed but not decoded."""
    data = known(name)
    if data.num_classes is None and not folder:
        return Found(name, data.summary, "yours", problem=data.by_hand)
    try:
        if data.package:
            read_packaged(known(name))
            return Found(name, data.summary, "verified", f"the package {data.package}")
        place = places.find(name, data, folder)
    except InputError as error:
        return Found(name, data.summary, "missing", problem=str(error))
    try:
        verified = _verify(name, data, place)
    except InputError as error:
        return Found(name, data.summary, "damaged", str(place), str(error))
    return Found(name, data.summary, "verified" if verified else "unverified", str(place))


def _verify(name: str, data: KnownData, place: Path) -> bool:
    """Compare the files with published digests; False if there are none."""
    if data.kind == "images":
        images.read_folder(place, images.SIZE, data.num_classes)
        return False
    if data.kind == "text":
        text.files_of(place)
        return False
    if data.kind == "table":
        return False
    files = cifar.files_of(name, place) if data.kind == "cifar" else idx.files_of(place)
    reading = Reading(name, dict(data.digests))
    for path in files:
        if path.name in data.digests:
            reading.require_published_file(path)
        else:  # compressed or otherwise named
            reading.content(path)
    return True


def user_problems(kind: str, place: Path, options: Mapping[str, Any]) -> Iterator[str]:
    """All that is wrong with what ``options`` of a recipe say about the users of a table or of image files.

    The sentences are for the owner of the data: they name rows and files, but never say how many examples a user has.
    """
    try:
        if kind == "images":
            yield from _problems_of_images(place, options)
        elif kind == "table" and (user := table_user(options)):
            yield from table.user_problems(place, Reading("table"), options.get("label", "label"), user)
    except InputError as error:
        yield str(error)


def _problems_of_images(place: Path, options: Mapping[str, Any]) -> Iterator[str]:
    users = ImageUsers.of(place, options)
    if users is None:
        return
    yield from users.problems
    train, test, _ = images.read_folder(place, images.SIZE, None)
    found = [users.of_files(part.example_ids()) for part in (train, test)]
    for part, ids in zip((train, test), found, strict=True):
        lacking = np.flatnonzero(ids == "")
        if part is train or len(lacking) < len(ids):
            yield from (f"{part.path(int(index))} has no user by {users.source}; it must have one" for index in lacking)
    for file in users.unused((*train.example_ids(), *test.example_ids())):
        yield f"{users.source} names {file}, which is not in {place}; remove the line, or add the image"
    refuse_shared_users(found[0], found[1][found[1] != ""], str(place))


def text_problems(name: str, place: Path, options: Mapping[str, Any], *, labelled: bool) -> Iterator[str]:
    """All that is wrong with the texts of a data set, by line; for the owner of the data."""
    data = known(name)
    try:
        if labelled and not data.classes and "classes" not in options:  # without a recipe nobody knows the classes
            columns = replace(text_columns(data, options, labelled=False), label=options.get("label"))
        else:
            columns = text_columns(data, options, labelled=labelled)
        yield from text.problems(place, Reading(name), columns)
    except InputError as error:
        yield str(error)


def undecodable(folder: Path, workers: int, progress: Callable[[int, int], None]) -> Iterator[str]:
    """Decode every image below ``folder`` and yield an error message for each that cannot be decoded.

    ``progress`` is called with the number of images done and the total.
    """
    train, test, _ = images.read_folder(folder, images.SIZE, None)
    done, total = 0, len(train) + len(test)
    for part in (train, test):
        for problem in DataLoader(_Problems(part), batch_size=None, num_workers=workers):
            done += 1
            progress(done, total)
            if problem:
                yield problem


class _Problems(Dataset[str]):
    """Dataset of the error message of each image; empty if it can be decoded."""

    def __init__(self, part: images.ImageFolder) -> None:
        self._part = part

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, index: int) -> str:
        try:
            self._part[index]
        except InputError as error:
            return str(error)
        return ""
