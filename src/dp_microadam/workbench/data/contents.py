"""Reads data files (plain, gzip or memory-mapped) and compares them with published digests."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_microadam.errors import InputError

MEMORY_GIB = 2.0
"""Files larger than this are memory-mapped instead of read, unless the recipe says otherwise."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Reading:
    """Options for reading files: expected digests by file name, and the size in bytes above which files are memory-mapped.

    A file without a known digest is accepted; its format is checked in any case.
    """

    name: str
    digests: MappingProxyType[str, str] | dict[str, str] = field(default_factory=dict)
    map_above: int = int(MEMORY_GIB * 2**30)

    def content(self, path: Path) -> Bytes:
        """The whole content of ``path``, decompressed if its name ends in .gz.

        Raises:
            InputError: naming the file, if it cannot be read, is damaged, or is not the published one.
        """
        content = _decompressed(path, self.map_above) if path.suffix == ".gz" else _plain(path, self.map_above)
        self.require_published(path, path.name.removesuffix(".gz"), content)
        return content

    def require_published(self, path: Path, name: str, content: Any) -> None:
        """Raise InputError if a digest is known for ``name`` and that of ``content`` differs; ``path`` is for the message."""
        name = name.replace(".idx", "-idx")  # as some copies of MNIST are called
        published = self.digests.get(name)
        if published and published != digest_like(published, content):
            raise self.not_published(path, name)

    def require_published_file(self, path: Path) -> None:
        """Like :meth:`require_published` for a file as it is on disk, such as an archive, without loading it."""
        published = self.digests.get(path.name)
        if published is None:
            return
        algorithm = published.partition(":")[0]
        try:
            with path.open("rb") as stream:
                found = f"{algorithm}:{hashlib.file_digest(stream, algorithm).hexdigest()}"
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
        if found != published:
            raise self.not_published(path, path.name)

    def not_published(self, path: Path, name: str) -> InputError:
        """The error for a file whose digest differs."""
        return InputError(
            f"{path} is not the published {name} of {self.name} (its {self.digests[name].partition(':')[0]} differs); fetch it "
            f"again with dp-microadam data get {self.name}, or set verify_data=false if it is your own data in this format"
        )


def digest_like(published: str, content: Any) -> str:
    """The digest of ``content`` by the algorithm of ``published``, which is written as algorithm:hexadecimal.

    >>> digest_like("md5:…", b"")
    'md5:d41d8cd98f00b204e9800998ecf8427e'
    """
    algorithm = published.partition(":")[0]
    # Some publishers give only MD5. It detects damage; an attacker who can replace data has easier ways.
    return f"{algorithm}:{hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()}"


def _plain(path: Path, map_above: int) -> Bytes:
    try:
        if path.stat().st_size > map_above:
            return np.memmap(path, np.uint8, "c")
        return np.fromfile(path, np.uint8)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None


def _decompressed(path: Path, map_above: int) -> Bytes:
    content = io.BytesIO()
    try:
        with gzip.open(path) as stream:
            while block := stream.read(2**22):
                content.write(block)
                if content.tell() > map_above:
                    raise InputError(too_large(path, map_above))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is not a whole gzip file ({error}); fetch it again") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    return np.frombuffer(content.getbuffer(), np.uint8)


def too_large(path: Path, map_above: int) -> str:
    """Error message for compressed data above the memory limit, which cannot be memory-mapped."""
    return (
        f"{path} holds more than data_memory_gib = {map_above / 2**30:g} and is compressed, so it cannot be memory-mapped; "
        "unpack it, or raise data_memory_gib"
    )
