"""Published files: downloaded, read into memory or memory-mapped, and compared with their digests."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError

import numpy as np
from numpy.typing import NDArray
from torch.hub import download_url_to_file

from dp_microadam.errors import DPMicroAdamError, InputError

MEMORY_GIB = 2.0
"""Files larger than this are memory-mapped instead of read, unless the recipe says otherwise."""

Bytes = NDArray[np.uint8]


def unreadable(path: Path, error: OSError) -> InputError:
    """The error for a file that cannot be opened."""
    return InputError(f"{path} cannot be read: {error.strerror or error}")


@dataclass(frozen=True)
class Reading:
    """Options for reading files: expected digests by file name, and the size in bytes above which files are memory-mapped.

    A file without a known digest is accepted; its format is checked in any case.
    """

    name: str
    digests: Mapping[str, str] = field(default_factory=dict)
    map_above: int = int(MEMORY_GIB * 2**30)

    def content(self, path: Path) -> Bytes:
        """The whole content of ``path``, decompressed if its name ends in .gz.

        Raises:
            InputError: naming the file, if it cannot be read, is damaged, or is not the published one.
        """
        try:
            if path.suffix == ".gz":
                content = self._decompressed(path)
            else:
                content = np.memmap(path, np.uint8, "c") if self.is_large(path) else np.fromfile(path, np.uint8)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(f"{path} is not a whole gzip file ({error}); fetch it again") from None
        except OSError as error:
            raise unreadable(path, error) from None
        name = path.name.removesuffix(".gz").replace(".idx", "-idx")  # as some copies of MNIST are called
        if name in self.digests:
            self._require(path, name, hashlib.sha256(content.data).hexdigest())
        return content

    def require_published(self, path: Path) -> None:
        """Raise InputError if a digest is known for the file as it is on disk, such as an archive, and its own differs."""
        try:
            with path.open("rb") as stream:
                if path.name in self.digests:
                    self._require(path, path.name, hashlib.file_digest(stream, "sha256").hexdigest())
        except OSError as error:
            raise unreadable(path, error) from None

    def is_large(self, path: Path) -> bool:
        """Whether the file is above the limit."""
        return path.stat().st_size > self.map_above

    def too_large(
        self, path: Path, why: str = "is compressed", remedy: str = "unpack it, or raise data_memory_gib"
    ) -> InputError:
        """The error for a file above the limit that cannot be memory-mapped."""
        limit = f"data_memory_gib = {self.map_above / 2**30:g}"
        return InputError(f"{path} holds more than {limit} and {why}, so it cannot be memory-mapped; {remedy}")

    def _decompressed(self, path: Path) -> Bytes:
        content = bytearray()
        with gzip.open(path) as stream:
            while block := stream.read(2**22):
                content += block
                if len(content) > self.map_above:
                    raise self.too_large(path)
        return np.frombuffer(content, np.uint8)

    def _require(self, path: Path, name: str, digest: str) -> None:
        if digest != self.digests.get(name, digest):
            raise InputError(
                f"{path} is not the published {name} of {self.name} (its SHA-256 differs); fetch it again with dp-microadam "
                f"data get {self.name}, or set verify_data=false if it is your own data in this format"
            )


class NotFetched(DPMicroAdamError):
    """Raised if no URL delivered the file; the message gives the reason for each."""


def fetch(name: str, digest: str, urls: Sequence[str], folder: Path, *, progress: bool = False) -> bool:
    """Download the file from below one of the ``urls`` into ``folder`` unless it is there; returns whether it was downloaded.

    Formal guarantees: a file appears under its name only when it is complete and its SHA-256 is the published one.

    Raises:
        NotFetched: if no URL delivered the published file.
    """
    target = folder / name
    if target.is_file():
        with target.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() == digest:
                return False
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    for url in (f"{base.rstrip('/')}/{name}" for base in urls):
        try:
            download_url_to_file(url, str(target), hash_prefix=digest, progress=progress)
        except (HTTPException, ValueError, URLError) as error:
            failures.append(f"{url}: {getattr(error, 'reason', None) or error or type(error).__name__}")
        except RuntimeError:  # of another digest
            failures.append(f"{url}: what it sent is not the published {name}")
        else:
            return True
    raise NotFetched("; ".join(failures))
