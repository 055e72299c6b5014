"""Downloads published files: resumes interrupted downloads, and keeps a file only if its digest is the published one."""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path

from dp_microadam.errors import DPMicroAdamError
from dp_microadam.workbench.data.catalogue import Download

PARTIAL = ".part"
"""Suffix of an incomplete download."""

_BLOCK = 2**18
_TIMEOUT_SECONDS = 30
_RANGE_NOT_SATISFIABLE = 416

Progress = Callable[[int, int | None], None]
"""Callback with the number of bytes so far, and the total if the server reports it."""


class NotFetched(DPMicroAdamError):
    """Raised if no URL delivered the file; the message gives the reason for each."""


def fetch(download: Download, folder: Path, progress: Progress, urls: Sequence[str] | None = None) -> bool:
    """Download the file into ``folder`` unless it is there already; returns whether it was downloaded.

    Formal guarantees: a file appears under its name only when it is complete and its SHA-256 is the published one. A partial
    download is kept beside it and resumed the next time.

    Raises:
        NotFetched: if no URL delivered the published file.
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
        # Resuming a wrong file would never make it right.
        partial.unlink()
        failures.append(f"{url}: what it sent is not the published {download.name}")
    raise NotFetched("; ".join(failures))


def _continue(url: str, partial: Path, progress: Progress) -> None:
    """Request the missing rest of ``partial`` and append it, or start over if the server does not support ranges."""
    there = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={there}-"} if there else {})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == _RANGE_NOT_SATISFIABLE and there:
            return  # the file is complete; the digest decides
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
