"""Weights by name: fetched from a server that speaks the protocol of the Hugging Face hub, and used again without a request."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tiny_text_models import LENGTH, save_bert, write_messages

NAME = "somebody/tiny-bert"
COMMIT = "0" * 40


@pytest.fixture
def hub(tmp_path):
    """The address of a hub that holds one model, and the list of what it was asked for."""
    folder = Path(save_bert(tmp_path / "bert"))

    requests = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            if self.path.startswith(f"/api/models/{NAME}"):
                files = [{"rfilename": file.name} for file in folder.iterdir()]
                listed = [] if "tree" in self.path else {"id": NAME, "sha": COMMIT, "siblings": files, "tags": []}
                return self.answer(json.dumps(listed).encode())
            file = folder / self.path.rpartition("/")[2]
            if "/resolve/" in self.path and file.is_file():
                return self.answer(file.read_bytes())
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None

        do_HEAD = do_GET

        def answer(self, content):
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_):
            """Nothing on standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_model_is_fetched_by_its_name_and_used_again_without_asking(hub, tmp_path):
    address, requests = hub
    data = write_messages(tmp_path / "data")
    own = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}

    def train(run):
        settings = [f"data_folder={data}", f"model_options.pretrained={NAME}", f"data_options.max_length={LENGTH}"]
        settings += ["batch_size=30", "steps=2", "physical_batch_size=16"]
        command = [sys.executable, "-m", "dp_microadam", "train", "sms-spam", "--json", "--quiet", "--run-dir", str(run)]
        command += [word for one in settings for word in ("--set", one)]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own}, timeout=300)

    first = train(tmp_path / "first")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["finished"]
    assert any(path.endswith("model.safetensors") for path in requests)
    requests.clear()
    again = train(tmp_path / "again")
    assert again.returncode == 0, again.stderr
    assert not [path for path in requests if NAME in path]
