"""Every block of code in the documents runs, in the order of its page, in one folder, as a reader would run it.

`make test` shortens what takes minutes: trainers and `dp-microadam train` stop after a few steps, loops over `epochs` make
one. `make test-all` runs every page as it stands. A block of text is the output of the block before it: each of its lines
must appear, whatever the numbers; in a block marked ``.exact`` the numbers must be these. ``…`` stands for anything.
"""

import ast
import contextlib
import doctest
import io
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from research.experiments.study import parse_study

from dp_microadam.training.trainer import PrivateTrainer
from dp_microadam.workbench.command_line.cli import build_parser, main
from dp_microadam.workbench.recipes.recipe import Recipe
from dp_microadam.workbench.recipes.recipe_files import load_recipe

ROOT = Path(__file__).parents[1]
STEPS = 2

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)

NOT_RUN = {
    r"pip install ": "changes the environment that the tests run in",
    r"eval ": "changes the shell that the tests run in; tests/workbench/command_line has what completes",
    r"make ": "the commands of the Makefile are what runs these tests",
    r"torchrun ": "starts several processes; tests/training/test_distributed.py does",
    r"python examples/journeys/": "takes minutes; tests/test_journeys.py runs them at a small size",
    r"pytest ": "run on the patched tree by tests/test_docs_diffs.py",
}
"""Lines of shell blocks that are neither run nor parsed here, and why."""

ONLY_PARSED = {
    r"dp-microadam tune": "takes as long as all its runs; tests/workbench/command_line/test_tune.py runs it",
    r"dp-microadam audit": "takes a minute; tests/workbench/command_line/test_audit.py runs it",
    r"dp-microadam report": "needs runs of the reader's own; tests/workbench/reporting/test_runs.py makes some and runs it",
    r"dp-microadam data get": "needs a network; tests/workbench/command_line/test_data.py runs it against a server of its own",
    r"dp-microadam data check imagenet": "needs ImageNet, which nobody may pass on",
    r"dp-microadam data check my\.(toml|csv)": "stands for a file of the reader's own",
    r"dp-microadam train (sms-spam|imdb|language-model)": "needs a pretrained model; tests/workbench/recipes/test_texts.py",
    r"dp-microadam train (cifar|fashion)": "needs files that must be downloaded first; tests/recipes runs such recipes",
    r"dp-microadam train +#": "the demo, which tests/workbench/command_line/test_cli_runs.py runs",
    r"dp-microadam (train|plan) my\.toml": "stands for a file of the reader's own",
    r"dp-microadam (resume|evaluate|export|predict|budget) runs/mine": "a run of the reader's own; test_cli_runs.py has one",
    r"dp-microadam predict spam-filter": "needs what the page exports; tests/workbench/recipes/test_texts.py predicts by such",
    r"dp-microadam train .*--set data=small-digits": "run on the patched tree by tests/test_docs_diffs.py",
}
"""Commands whose options must be accepted, and whose recipe must be one, but which are not run, and why."""

NOT_PYTHON = {
    'models.deit("tiny", num_classes=10, pretrained="facebook/': "fetches weights from the hub",
    "trainer = PrivateHFTrainer(model, args": "an excerpt of examples/text_classification.py, run by tests/test_examples.py",
    "class Model(PrivateLightningModule)": "an excerpt of examples/lightning_digits.py, run by tests/test_examples.py",
    'pipeline("text-classification", "spam-filter")': "needs what the page exports; test_texts.py loads such",
    "record = ledger_from_opacus(": "an excerpt of what tests/integrations/test_opacus.py runs",
}
"""Python blocks that are compiled and not run, by something in them, and why."""

ONLY_WHOLE = ("fine_tuning.md", "index.md")
"""Pages that take long even when shortened: in `make test-all` only."""


@dataclass(frozen=True)
class Block:
    language: str
    info: str
    code: str
    place: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        depth = len(match["indent"])
        code = "".join(line[depth:] or "\n" for line in match["code"].splitlines(keepends=True))
        language = next(iter(re.findall(r"\w+", match["info"])), "")
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(language, match["info"], code, f"{page.name}:{line}"))
    return found


class Reader:
    """Works through one page."""

    def __init__(self, folder: Path, *, whole: bool) -> None:
        self.folder = folder
        self.whole = whole
        self.names: dict[str, object] = {"__name__": "__main__"}
        self.output = ""
        self.all_ran = True

    def read(self, block: Block) -> None:
        if not block.language:
            return  # a drawing
        if block.language == "text":
            self.compare(block)
            return
        self.all_ran = True
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            {
                "python": self.run_python,
                "pycon": self.run_session,
                "bash": self.run_shell,
                "toml": self.check_recipe,
                "diff": lambda block: None,  # tests/test_docs_diffs.py
            }[block.language](block)
        self.output = printed.getvalue()

    def run_python(self, block: Block) -> None:
        code = block.code if self.whole else re.sub(r"^epochs = \d+", "epochs = 1", block.code, flags=re.MULTILINE)
        title = re.search(r'title="([\w./]+)"', block.info)
        if title:
            (self.folder / title[1]).write_text(block.code, encoding="utf-8")
        program = compile(code, block.place, "exec")
        if not any(part in code for part in NOT_PYTHON):
            exec(program, self.names)

    def run_session(self, block: Block) -> None:
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        session = doctest.DocTestParser().get_doctest(block.code, self.names, block.place, None, 0)
        session.globs = self.names  # what later blocks see
        problems: list[str] = []
        doctest.DocTestRunner(optionflags=options).run(session, out=problems.append, clear_globs=False)
        assert not problems, "".join(problems)

    def check_recipe(self, block: Block) -> None:
        title = re.search(r'title="([\w./]+)"', block.info)
        if "\n[recipe]\n" in block.code:
            parse_study(block.code, block.place, "full")
        else:
            Recipe.from_toml(block.code)
        if title:
            (self.folder / title[1]).write_text(block.code, encoding="utf-8")

    def run_shell(self, block: Block) -> None:
        for line in block.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if not words:
                continue
            if any(re.match(pattern, line) for pattern in NOT_RUN):
                self.all_ran = False
                continue
            if words[0] == "python":
                # An earlier block of the page showed it under this name, and was run already.
                assert (self.folder / words[1]).is_file(), f"{block.place}: {words[1]} is shown nowhere before"
                continue
            assert words[0] == "dp-microadam", f"{block.place}: no test runs {line!r}, and no reason says why"
            arguments = words[1:]
            if any(re.match(pattern, line) for pattern in ONLY_PARSED):
                self.parse(arguments)
                self.all_ran = False
                continue
            if arguments[0] == "train" and not self.whole:
                arguments += ["--set", f"max_steps={STEPS}"]
            assert main(arguments) == 0, f"{block.place}: {line}"

    def parse(self, arguments: list[str]) -> None:
        options = build_parser().parse_args(arguments)
        recipe = getattr(options, "recipe", None)
        if recipe is not None and not recipe.endswith(".toml"):
            load_recipe(recipe, [change for change in options.overrides if "small-digits" not in change])

    def compare(self, block: Block) -> None:
        if not self.all_ran:
            return
        exact = ".exact" in block.info
        seen = _masked(self.output, exact)
        position = 0
        for line in block.code.splitlines():
            pattern = ".*?".join(re.escape(part) for part in _masked(line, exact).strip().split("…"))
            found = re.search(pattern, seen[position:])
            assert found, f"{block.place}: {line!r} is not in the output\n{self.output}"
            position += found.end()


def _masked(text: str, exact: bool) -> str:
    """One space for any white space; one sign for any number, unless the numbers matter."""
    text = re.sub(r"\s+", " ", text)
    return text if exact else re.sub(r"\d[\d.,]*\d|\d", "0", text)


PAGES = {
    page.name: page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
    if any(block.language for block in blocks_of(page))
}


def work_through(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, whole: bool) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")
    if not whole:
        _stop_early(monkeypatch)
    reader = Reader(folder, whole=whole)
    with torch.random.fork_rng(devices=[]):
        for block in blocks_of(page):
            reader.read(block)


def _stop_early(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrivateTrainer.__init__

    def stops_early(self, *arguments, max_steps=None, **options):
        original(self, *arguments, max_steps=min(max_steps or STEPS, STEPS), **options)

    monkeypatch.setattr(PrivateTrainer, "__init__", stops_early)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ONLY_WHOLE])
def test_every_block_of_a_page_runs(page, tmp_path, monkeypatch):
    work_through(PAGES[page], tmp_path, monkeypatch, whole=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_page_runs_as_it_stands(page, tmp_path, monkeypatch):
    work_through(PAGES[page], tmp_path, monkeypatch, whole=True)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_imports_what_it_uses(page):
    """A reader copies one block: what an earlier one of the page imported is imported again. Variables may be from before."""
    imported: set[str] = set()
    for block in blocks_of(PAGES[page]):
        if block.language not in ("python", "pycon"):
            continue
        examples = doctest.DocTestParser().get_examples(block.code)
        tree = ast.parse(block.code if block.language == "python" else "".join(example.source for example in examples))
        found = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        own = {(name.asname or name.name).partition(".")[0] for node in found for name in node.names}
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not used & imported - own, block.place
        imported |= own


def test_every_reason_still_has_its_block():
    code = "\n".join(block.code for page in PAGES.values() for block in blocks_of(page))
    for pattern in (*NOT_RUN, *ONLY_PARSED):
        assert re.search(f"^{pattern}", code, re.MULTILINE), f"no block has {pattern!r} any more"
    for part in NOT_PYTHON:
        assert part in code, f"no block has {part!r} any more"
