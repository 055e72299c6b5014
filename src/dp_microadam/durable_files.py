"""Files that appear whole or not at all, and stay after a power cut."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def write_durably(path: Path, *, replace: bool = True) -> Iterator[IO[bytes]]:
    """A binary file to write to; ``path`` has its content when the block ends, and is untouched if the block raises.

    The content is written under another name in the same folder and synced before it gets its name, then the folder is
    synced too: a rename is durable once the folder that holds the name is. The file can be read back and sought in. With
    ``replace=False`` an existing file is left alone and FileExistsError is raised.
    """
    # Those who replace a file hold its lock, so what a killed one left unfinished is written over and does not pile up.
    own = "" if replace else f".{secrets.token_hex(8)}"
    temporary = path.with_name(f"{path.name}{own}.unfinished")
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_text_durably(path: Path, text: str) -> None:
    """Replace a text file as a whole."""
    with write_durably(path) as file:
        file.write(text.encode())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
