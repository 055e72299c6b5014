"""Fetching from a real server on this machine: resumed, checked, and honest about what went wrong."""

import hashlib
import http.server
import threading

import pytest

from dp_microadam.workbench.data.catalogue import KNOWN_DATA, Download, known
from dp_microadam.workbench.data.download import NotFetched, fetch

CONTENT = bytes(range(256)) * 4000
NAME = "archive.tar.gz"


class Server:
    """Serves ``content`` under any address, with ranges if ``ranges``; cuts answers off after ``limit`` bytes."""

    def __init__(self, content=CONTENT, *, ranges=True, limit=None, status=None):
        self.content, self.ranges, self.limit, self.status = content, ranges, limit, status
        self.asked = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                wanted = self.headers.get("Range")
                outer.asked.append(wanted)
                first = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and outer.ranges else 0
                if outer.status or first >= len(outer.content) > 0:
                    self.send_error(outer.status or 416)
                    return
                body = outer.content[first:]
                self.send_response(206 if first else 200)
                if first:
                    self.send_header("Content-Range", f"bytes {first}-{len(outer.content) - 1}/{len(outer.content)}")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: outer.limit])

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/{NAME}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


def download(*urls, content=CONTENT):
    return Download(NAME, hashlib.sha256(content).hexdigest(), urls)


def quiet(done, total):
    pass


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_is_fetched_whole_and_progress_is_told(tmp_path):
    told = []
    with Server() as server:
        assert fetch(download(server.url), tmp_path / "new", lambda *state: told.append(state))
    assert files_in(tmp_path / "new") == {NAME: CONTENT}
    assert told[0] == (0, len(CONTENT))
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert told == sorted(told)


def test_a_file_that_is_there_is_not_fetched_again(tmp_path):
    (tmp_path / NAME).write_bytes(CONTENT)
    with Server() as server:
        assert not fetch(download(server.url), tmp_path, quiet)
        assert server.asked == []


def test_a_damaged_file_that_is_there_is_replaced(tmp_path):
    (tmp_path / NAME).write_bytes(CONTENT[:-1])
    with Server() as server:
        assert fetch(download(server.url), tmp_path, quiet)
    assert files_in(tmp_path) == {NAME: CONTENT}


def test_a_connection_that_ends_early_is_told_and_continued_next_time(tmp_path):
    with Server(limit=300_000) as server, pytest.raises(NotFetched, match=r"300,000 of 1,024,000 bytes; run the same command"):
        fetch(download(server.url), tmp_path, quiet)
    assert files_in(tmp_path) == {f"{NAME}.part": CONTENT[:300_000]}
    with Server() as server:
        assert fetch(download(server.url), tmp_path, quiet)
        assert server.asked == ["bytes=300000-"]
    assert files_in(tmp_path) == {NAME: CONTENT}


def test_a_server_that_cannot_continue_is_asked_for_the_whole(tmp_path):
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:1000])
    with Server(ranges=False) as server:
        assert fetch(download(server.url), tmp_path, quiet)
    assert files_in(tmp_path) == {NAME: CONTENT}


def test_a_part_that_is_whole_already_is_taken(tmp_path):
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT)
    with Server() as server:
        assert fetch(download(server.url), tmp_path, quiet)
    assert files_in(tmp_path) == {NAME: CONTENT}


@pytest.mark.parametrize("there", [0, 1000, len(CONTENT) + 5])
def test_a_file_with_another_digest_is_not_kept(tmp_path, there):
    if there:
        (tmp_path / f"{NAME}.part").write_bytes(b"\0" * there)
    with Server() as server, pytest.raises(NotFetched, match=r"what it sent is not the published archive.tar.gz"):
        fetch(download(server.url, content=b"something else"), tmp_path, quiet)
    assert files_in(tmp_path) == {}


def test_a_damaged_part_is_thrown_away_so_that_the_next_attempt_succeeds(tmp_path):
    (tmp_path / f"{NAME}.part").write_bytes(b"\0" * 1000)
    with Server() as server:
        with pytest.raises(NotFetched):
            fetch(download(server.url), tmp_path, quiet)
        assert fetch(download(server.url), tmp_path, quiet)
    assert files_in(tmp_path) == {NAME: CONTENT}


def test_the_next_address_is_tried_when_one_fails(tmp_path):
    with Server(status=404) as gone, Server(content=b"wrong") as wrong, Server() as right:
        assert fetch(download(gone.url, "http://127.0.0.1:1/x", wrong.url, right.url), tmp_path, quiet)
    assert files_in(tmp_path) == {NAME: CONTENT}


def test_what_went_wrong_is_told_for_each_address(tmp_path):
    with Server(status=404) as server, pytest.raises(NotFetched) as refusal:
        fetch(download(server.url, "http://127.0.0.1:1/x", "nonsense"), tmp_path, quiet)
    for part in (f"{server.url}: Not Found", "http://127.0.0.1:1/x: Connection refused", "nonsense: unknown url type"):
        assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", [name for name in KNOWN_DATA if known(name).downloads])
def test_every_download_has_a_digest_and_addresses_that_end_in_its_name(name):
    for one in known(name).downloads:
        assert len(bytes.fromhex(one.sha256)) == 32
        assert one.urls
        assert all(url.endswith(f"/{one.name}") for url in one.urls)


@pytest.mark.parametrize("name", KNOWN_DATA)
def test_digests_are_whole(name):
    for digest in known(name).digests.values():
        algorithm, _, value = digest.partition(":")
        assert len(bytes.fromhex(value)) == {"sha256": 32, "md5": 16}[algorithm]
