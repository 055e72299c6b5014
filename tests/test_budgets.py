"""The project stays of a size that one person can read; what outgrows its budget has to replace something."""

import inspect
from pathlib import Path

import pytest
from test_keywords import CALLABLES

import dp_microadam

ROOT = Path(__file__).parents[1]


def files(pattern):
    return [path for path in ROOT.glob(pattern) if "__pycache__" not in path.parts]


def lines(pattern):
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files(pattern))


def words(pattern):
    return sum(len(path.read_text(encoding="utf-8").split()) for path in files(pattern))


BUDGETS = {
    "modules of the package": (170, lambda: len(files("src/**/*.py"))),
    "lines of the package": (29_100, lambda: lines("src/**/*.py")),  # on the way to 26,000
    "lines of tests": (26_800, lambda: lines("tests/**/*.py")),  # on the way to 22,000
    "lines of research": (4_000, lambda: lines("research/**/*.py")),
    "words of the documentation": (28_000, lambda: words("docs/*.md")),
    "words of the README": (600, lambda: words("README.md")),
    "names at the top of the package": (20, lambda: len(dp_microadam.__all__)),
}


@pytest.mark.parametrize("what", BUDGETS)
def test_a_budget_is_kept(what):
    most, count = BUDGETS[what]
    assert 0 < count() <= most


@pytest.mark.parametrize("called", sorted(CALLABLES))
def test_nothing_public_has_more_than_fifteen_arguments_of_its_own(called):
    """What it passes on to another function or a host is that one's."""
    value = CALLABLES[called].__init__ if inspect.isclass(CALLABLES[called]) else CALLABLES[called]
    function = inspect.unwrap(getattr(value, "__func__", value))
    if inspect.isfunction(function):
        parameters = inspect.signature(function).parameters.values()
        own = [each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
        assert len([name for name in own if name not in ("self", "cls")]) <= 15
