"""Checks which data sets are on this machine, and whether their files are the published ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.utils.data import DataLoader, Dataset

from dp_microadam.data import cifar, idx, images, places
from dp_microadam.data.catalogue import KnownData, known
from dp_microadam.data.contents import Reading
from dp_microadam.data.sources import read_packaged
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
