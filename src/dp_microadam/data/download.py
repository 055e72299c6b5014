"""Fetching published files: resumed where an earlier attempt stopped, and kept only if their digest is the published one."""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path

from dp_microadam.data.catalogue import Download
from dp_microadam.errors import DPMicroAdamError

PARTIAL = ".part"
"""Added to the name of a file that is not whole yet."""

_BLOCK = 2**18
_SECONDS_WITHOUT_AN_ANSWER = 30
_NOT_MORE_THAN_WE_HAVE = 416

Progress = Callable[[int, int | None], None]
"""Called with the bytes there are by now, and how many there will be if the server tells."""


class NotFetched(DPMicroAdamError):
    """No address gave the file. The message says why, for each."""


def fetch(download: Download, folder: Path, progress: Progress, urls: Sequence[str] | None = None) -> bool:
    """Put the file into ``folder`` unless it is there already, and say whether it had to be fetched.

    Formal guarantees: a file appears under its name only when it is whole and its SHA-256 is the published one. What arrived
    before a failure is kept beside it and continued next time.

    Raises:
        NotFetched: if no address delivered the published file.
    """
    target = folder / download.name
    if target.is_file() and _sha256(target) == download.sha256:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (download.name + PARTIAL)
    failures = []
    for url in urls or download.urls:
        try:
            _continue(url, partial, progress)
        except (OSError, HTTPException, ValueError) as error:
            failures.append(f"{url}: {_reason(error)}")
            continue
        if _sha256(partial) == download.sha256:
            partial.replace(target)
            return True
        # Continuing what is wrong would stay wrong.
        partial.unlink()
        failures.append(f"{url}: what it sent is not the published {download.name}")
    raise NotFetched("; ".join(failures))


def _continue(url: str, partial: Path, progress: Progress) -> None:
    """Ask for what is missing of ``partial`` and append it, or begin anew if the server cannot continue."""
    there = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={there}-"} if there else {})
    try:
        response = urllib.request.urlopen(request, timeout=_SECONDS_WITHOUT_AN_ANSWER)
    except urllib.error.HTTPError as error:
        if error.code == _NOT_MORE_THAN_WE_HAVE and there:
            return  # nothing is missing; the digest decides
        raise
    with response:
        continues = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {there}-")
        if not continues:
            there = 0
        length = response.headers.get("Content-Length")
        total = there + int(length) if length else None
        progress(there, total)
        with partial.open("ab" if continues else "wb") as stream:
            while block := response.read(_BLOCK):
                stream.write(block)
                there += len(block)
                progress(there, total)
    if total is not None and there < total:
        raise ConnectionError(f"the connection ended after {there:,} of {total:,} bytes; run the same command again to go on")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _reason(error: Exception) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(getattr(cause, "strerror", None) or cause or type(cause).__name__)
