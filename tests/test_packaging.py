"""What is published installs into an empty environment and works there."""

import os
import re
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command, **options):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "OMP_NUM_THREADS": "1"},
        **options,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """An environment with nothing but the wheel; its dependencies are lent by this one, so that none is downloaded."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", built[1])
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python, packages


def test_the_wheel_holds_types_recipes_and_the_licence(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = set(wheel.namelist())
    source = ROOT / "src"
    wanted = {str(path.relative_to(source)) for path in (source / "dp_microadam").rglob("*") if path.suffix in (".py", ".toml")}
    assert "dp_microadam/py.typed" in names
    assert "dp_microadam/workbench/recipes/demo.toml" in wanted <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "examples/")) or name.endswith((".nbc", ".nbi", ".pyc"))]


def test_the_sdist_holds_all_that_is_needed_to_test_it(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"CITATION.cff", "Makefile", "constraints.txt", "tests/test_packaging.py", "examples/README.md", "LICENSE"} <= names


def test_the_installed_package_is_the_one_that_runs(installed):
    python, packages = installed
    place = run(python, "-c", "import dp_microadam; print(dp_microadam.__file__)").strip()
    assert Path(place).is_relative_to(packages)
    assert "train" in run(python, "-m", "dp_microadam", "--help")
    assert run(python.with_name("dp-microadam"), "--version").startswith("dp-microadam ")


@pytest.mark.slow
def test_the_installed_package_trains(installed, tmp_path):
    quick = [part for key in ("model=mlp", "max_steps=2") for part in ("--set", key)]
    out = run(installed[0], "-m", "dp_microadam", "train", *quick, "--quiet", "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert re.search(r"^ε = \d+\.\d\d at δ = 1e-05$", out, flags=re.MULTILINE)


def test_the_citation_names_the_paper_and_this_version():
    from dp_microadam import __version__

    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in citation
    assert "DP-MicroAdam: Private and Frugal Algorithm for Training and Fine-tuning" in citation
    for name in ("Hudişteanu", "Kalinin", "Cyffers"):
        assert f"family-names: {name}" in citation
