"""Checks which data sets are on this machine, and whether their files are the published ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from dp_microadam.errors import InputError
from dp_microadam.workbench.data import adult, cifar, idx, images, places, text
from dp_microadam.workbench.data.catalogue import KnownData, known
from dp_microadam.workbench.data.contents import Reading
from dp_microadam.workbench.data.dataset import TEST_FRACTION, TEST_SEED, split
from dp_microadam.workbench.data.image_decoding import BIT_DEPTHS, used_bits
from dp_microadam.workbench.data.image_listing import Listing, list_images
from dp_microadam.workbench.data.image_users import ImageUsers
from dp_microadam.workbench.data.sources import bit_depth_of, read_packaged, text_columns
from dp_microadam.workbench.data.users import count_users, refuse_shared_users

_LOOKED_AT = 200
"""Images of a folder whose bits are counted."""
_DARK = 14
"""Bits below which 16-bit images are likely to have another depth."""


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


def inspect(name: str, folder: str | None = None, *, verify: bool = True) -> Found:
    """Check a data set in ``folder`` or the default folders. Image files are listed but not decoded.

    Without ``verify``, files may differ from the published ones, as with ``verify_data = false`` in a recipe.
    """
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
        verified = _verify(name, data, place, verify)
    except InputError as error:
        return Found(name, data.summary, "damaged", str(place), str(error))
    return Found(name, data.summary, "verified" if verified else "unverified", str(place))


def _verify(name: str, data: KnownData, place: Path, verify: bool) -> bool:
    """Compare the files with published digests; False if there are none."""
    if data.kind == "images":
        list_images(place, data.num_classes if verify else None).require_in_order()
        return False
    if data.kind == "text":
        text.files_of(place)
        return False
    if data.kind == "table":
        return False
    if data.kind == "adult":
        files = adult.files_of(place)
    else:
        files = cifar.files_of(name, place) if data.kind == "cifar" else idx.files_of(place)
    reading = Reading(name, dict(data.digests) if verify else {})
    for path in files:
        if path.name in data.digests:
            reading.require_published_file(path)
        else:  # compressed or otherwise named
            reading.content(path)
    return verify


def user_problems(place: Path, options: Mapping[str, Any]) -> Iterator[str]:
    """All that is wrong with what ``options`` of a recipe say about the users of image files.

    The sentences are for the owner of the data: they name files, but never say how many examples a user has.
    """
    try:
        yield from _problems_of_images(list_images(place), options)
    except InputError as error:
        yield str(error)


def _problems_of_images(listing: Listing, options: Mapping[str, Any]) -> Iterator[str]:
    users = ImageUsers.of(listing.folder, options)
    if users is None:
        return
    yield from users.problems
    found = [users.of_files(part.files) for part in listing.parts]
    for number, (part, ids) in enumerate(zip(listing.parts, found, strict=True)):
        lacking = np.flatnonzero(ids == "")
        if number == 0 or len(lacking) < len(ids):
            for index in lacking:
                file = listing.folder / os.fsdecode(bytes(part.files[index]))
                yield f"{file} has no user by {users.source}; it must have one: rename the file, or extend what names users"
    for unused in users.unused(file for part in listing.parts for file in part.files):
        yield f"{users.source} names {unused}, which is not in {listing.folder}; remove the line, or add the image"
    if len(found) == 2:
        refuse_shared_users(found[0], found[1][found[1] != ""], str(listing.folder))


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


def image_problems(
    name: str, place: Path, options: Mapping[str, Any], workers: int, progress: Callable[[int, int], None]
) -> Iterator[str]:
    """All that is wrong with a folder of images: its layout, and every file that cannot be decoded.

    ``progress`` is called with the number of images done and the total.
    """
    images.require_pillow()
    listing = list_images(place, known(name).num_classes)
    yield from listing.problems
    done, total = 0, sum(len(part.files) for part in listing.parts)
    for part in listing.parts:
        folder = images.ImageFolder(place, part.files, part.labels, images.SIZE, bit_depth_of(options))
        for problem in DataLoader(_Problems(folder), batch_size=None, num_workers=workers):
            done += 1
            progress(done, total)
            if problem:
                yield problem


def image_summary(place: Path, options: Mapping[str, Any], unit_name: str = "user") -> list[str]:
    """What a folder of images that is in order holds: its classes, its parts, and what was passed over.

    Where users are known, they are counted, by the name of ``unit_name``: how many images they have together is private, and
    not said.
    """
    listing = list_images(place)
    shown = ", ".join(listing.classes[:10]) + (", …" if len(listing.classes) > 10 else "")
    lines = [f"{len(listing.classes)} classes: {shown}"]
    users = ImageUsers.of(place, options)
    if users is None:
        counted, counts = "images", [len(part.files) for part in listing.parts]
    else:
        found = [users.of_files(part.files) for part in listing.parts]
        counted, counts = f"{unit_name}s", [count_users(ids[ids != ""]) for ids in found]
    if len(counts) == 2:
        tested = f"{counts[1]:,} to test on" if counts[1] else f"a test part that names no {unit_name}s"
        lines.append(f"{counts[0]:,} {counted} to train on, before a part of them is held out, and {tested}")
    else:
        training, test = split(counts[0], TEST_FRACTION, TEST_SEED)
        lines.append(
            f"{counts[0]:,} {counted} without a test part of their own: a fifth, {len(test):,}, is split off to test on, "
            f"which leaves {len(training):,} to train on, before a part of them is held out"
        )
    return [*lines, *([listing.note] if listing.note else []), *_bit_depth_hint(listing, bit_depth_of(options))]


def _bit_depth_hint(listing: Listing, declared: int) -> Iterator[str]:
    files = [file for part in listing.parts for file in part.files]
    some = files[:: max(1, len(files) // _LOOKED_AT)]
    used = max((used_bits(listing.folder / os.fsdecode(bytes(file))) for file in some), default=0)
    if 0 < used <= _DARK and used < declared:
        bits = max(used, BIT_DEPTHS.start)
        yield (
            f"the 16-bit images among {len(some)} that were looked at use {used} bits, and would be dark: if the device that "
            f"made them writes {bits} bits, declare data_options.bit_depth = {bits}"
        )


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
