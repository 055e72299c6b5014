"""Atomic, durable file writes: a file is written completely or not at all, and survives a power cut."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dp_microadam.errors import InputError


@contextmanager
def write_durably(path: Path, *, replace: bool = True) -> Iterator[IO[bytes]]:
    """Open a binary file that replaces ``path`` atomically when the block ends; if the block raises, ``path`` is unchanged.

    The content goes to a temporary file in the same folder, which is synced and then renamed. The folder is synced as well,
    because a rename is durable only once the folder is. The file supports reading and seeking. With ``replace=False`` an
    existing file is left alone and FileExistsError is raised.
    """
    # A caller that replaces a file holds its lock, so the temporary name of a killed process can be reused.
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
    """Replace a text file atomically and durably."""
    with write_durably(path) as file:
        file.write(text.encode())


def refuse_links_out(folder: Path) -> None:
    """Check that nothing in a folder, which somebody may have sent, is a link to what lies outside of it.

    Raises:
        InputError: naming the link. ``folder`` itself may be one.
    """
    inside = folder.resolve()
    for parent, folders, files in os.walk(inside):
        for entry in (Path(parent, name) for name in (*folders, *files)):
            if entry.is_symlink() and not Path(os.path.realpath(entry)).is_relative_to(inside):
                raise InputError(f"{entry} is a link to {os.readlink(entry)}, outside of {folder}; put the file itself there")


def sync_folder(path: Path) -> None:
    """Sync a folder, which makes renames and new files in it durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
