"""``dp-microadam data``: list, download and verify data sets, and remove features that were kept of them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_microadam.errors import DPMicroAdamError, InputError
from dp_microadam.workbench.command_line.completers import complete_with, data_set_names

if TYPE_CHECKING:
    from dp_microadam.workbench.data.catalogue import Download
    from dp_microadam.workbench.data.download import Progress
    from dp_microadam.workbench.recipes.recipe import Recipe

_REFRESH_SECONDS = 0.2
_LINE_SECONDS = 5.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "data",
        help="list, download and verify data sets; remove kept features",
        description="List the known data sets and where they were found, download one, or verify one.",
        epilog="examples:\n  dp-microadam data list\n  dp-microadam data get cifar10",
    )
    parser.set_defaults(run=lambda options: parser.print_help())
    actions = parser.add_subparsers(title="actions", metavar="ACTION")

    listing = actions.add_parser(
        "list",
        help="known data sets, where each was found, and whether its files match the published digests",
        epilog="example:\n  dp-microadam data list --json",
    )
    listing.add_argument("--json", action="store_true", help="print JSON and nothing else")
    listing.set_defaults(run=run_list)

    get = actions.add_parser(
        "get",
        help="download a data set from its publisher",
        epilog="example:\n  dp-microadam data get mnist --folder data/mnist",
    )
    name = get.add_argument("name", metavar="NAME", help="name of a data set, as shown by `data list`")
    complete_with(data_set_names, name)
    get.add_argument("--folder", type=Path, metavar="DIR", help="target folder (default: where recipes look for it)")
    get.add_argument("--mirror", metavar="URL", help="base URL of a server with the same files; digests are still checked")
    get.add_argument("--json", action="store_true", help="print JSON and nothing else")
    get.set_defaults(run=run_get)

    check = actions.add_parser(
        "check",
        help="verify a data set: compare file digests, decode every image, read every row; of a recipe also who its users are",
        epilog="examples:\n  dp-microadam data check image-folder --folder photographs --workers 2\n"
        "  dp-microadam data check patients.csv --suggest > mine.toml\n  dp-microadam data check mine.toml",
    )
    name = check.add_argument(
        "name", metavar="NAME", help="name of a data set, as in `data list`, a recipe's name or TOML file, or a CSV file"
    )
    complete_with(data_set_names, name)
    check.add_argument(
        "--suggest",
        action="store_true",
        help="of a CSV file: print a first recipe with a declaration of its columns; it is written from private rows, and says "
        "what of it must be public knowledge",
    )
    check.add_argument("--label", metavar="COLUMN", help="with --suggest: the column of labels (default: the last)")
    check.add_argument("--folder", metavar="DIR", help="folder of the data set (default: where recipes look for it)")
    check.add_argument("--workers", type=int, default=0, metavar="N", help="worker processes that decode images (default: 0)")
    check.add_argument("--json", action="store_true", help="print JSON and nothing else")
    check.set_defaults(run=run_check)

    clean = actions.add_parser(
        "clean",
        help="remove the features that recipes with cache_features kept; they are computed again when needed",
        epilog="example:\n  dp-microadam data clean",
    )
    clean.add_argument("--folder", type=Path, metavar="DIR", help="folder of the features (default: the user's cache)")
    clean.add_argument("--json", action="store_true", help="print JSON and nothing else")
    clean.set_defaults(run=run_clean)


def run_list(options: argparse.Namespace) -> int:
    from dp_microadam.workbench.data.catalogue import KNOWN_DATA
    from dp_microadam.workbench.data.inspection import inspect

    found = [inspect(name) for name in KNOWN_DATA]
    if options.json:
        print(json.dumps([asdict(one) for one in found], ensure_ascii=False))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Data sets", title_justify="left")
    for column in ("name", "what", "state"):
        table.add_column(column)
    table.add_column("where it is, or how to get it", overflow="fold")
    for one in found:
        table.add_row(one.name, one.summary, one.state, one.place or _how_to_get(one.name))
    console = Console(highlight=False)
    console.print(table)
    for one in found:
        if one.state == "damaged":
            console.print(f"{one.name}: {one.problem}", soft_wrap=True, markup=False)
    return 0


def _how_to_get(name: str) -> str:
    from dp_microadam.workbench.data.catalogue import known

    data = known(name)
    return f"dp-microadam data get {name}" if data.downloads else data.by_hand.removeprefix(f"{name} is your own data; ")


def run_get(options: argparse.Namespace) -> int:
    from dp_microadam.workbench.data import places
    from dp_microadam.workbench.data.catalogue import known
    from dp_microadam.workbench.data.download import NotFetched, fetch

    data = known(options.name)
    if not data.downloads:
        raise InputError(f"{options.name} cannot be downloaded: {data.by_hand}")
    folder: Path = options.folder or places.own_folder(options.name)
    fetched = []
    for download in data.downloads:
        urls = [f"{options.mirror.rstrip('/')}/{download.name}"] if options.mirror else None
        try:
            with _progress(download) as progress:
                fetched.append(fetch(download, folder, progress, urls))
        except NotFetched as error:
            wanted = ", ".join(f"{one.name} (sha256 {one.sha256})" for one in data.downloads)
            raise DPMicroAdamError(
                f"{options.name} could not be fetched ({error}); if this machine has no network, put {wanted} into {folder}"
            ) from None
        except OSError as error:
            raise DPMicroAdamError(
                f"{folder / download.name} cannot be written ({error.strerror or error}); name another folder by --folder"
            ) from None
    if options.json:
        print(json.dumps({"name": options.name, "folder": str(folder), "fetched": sum(fetched), "verified": True}))
    else:
        what = "fetched and verified" if any(fetched) else "was there already, verified"
        print(f"{options.name} {what}: {folder}")
    return 0


def run_check(options: argparse.Namespace) -> int:
    from dp_microadam.validation import require_integer
    from dp_microadam.workbench.data.catalogue import known, takes_columns
    from dp_microadam.workbench.data.inspection import image_problems, image_summary, inspect, text_problems, user_problems
    from dp_microadam.workbench.data.table_check import PRIVATE

    require_integer("workers", options.workers, 0)
    if options.suggest or options.name.lower().endswith(".csv"):
        return _suggest(options)
    name: str = options.name
    folder: str | None = options.folder
    data_options: dict[str, Any] = {}
    recipe = _recipe(options)
    if recipe is not None:
        name, folder, data_options = recipe.data, folder or recipe.data_folder or None, recipe.data_options
    found = inspect(name, folder, verify=recipe is None or recipe.verify_data)
    kind = known(name).kind
    problems = [found.problem] if found.problem else []
    summary: list[str] = []
    notes: list[str] = []
    if found.place and kind == "images":
        with _counter("images") as count:
            problems = list(image_problems(name, Path(found.place), data_options, options.workers, count))
        problems += user_problems(Path(found.place), data_options)
        if not problems:
            summary = image_summary(Path(found.place), data_options, (recipe and recipe.unit_name) or "user")
    if found.place and not problems and takes_columns(name) and (recipe is not None or kind == "table"):
        problems, notes = _check_table(recipe, folder)
    if found.place and not problems and kind == "text":
        labelled = recipe is None or not recipe.predicts_tokens
        problems = list(text_problems(name, Path(found.place), data_options, labelled=labelled))
    if options.json:
        values = {"name": name, "place": found.place, "state": found.state, "problems": problems, "summary": summary}
        print(json.dumps({**values, "notes": notes}, ensure_ascii=False))
    elif problems:
        print("\n".join(problems))
    else:
        print("\n".join([f"{name} is {'in order' if found.state == 'unverified' else found.state}: {found.place}", *summary]))
    if notes and not options.json:
        print("\n".join((*(f"note: {note}" for note in notes), f"note: {PRIVATE}")))
    if found.state == "missing":
        return 2
    return 1 if problems else 0


def run_clean(options: argparse.Namespace) -> int:
    from dp_microadam.training.feature_store import FeatureStore

    store = FeatureStore(options.folder)
    freed = store.clean()
    if options.json:
        print(json.dumps({"folder": str(store.folder), "freed_bytes": freed}))
    else:
        print(f"{freed / 1e6:,.1f} MB of features removed from {store.folder}")
    return 0


def _recipe(options: argparse.Namespace) -> Recipe | None:
    """The recipe to check the data of; None for the name of a data set, unless that needs its recipe to be read."""
    from dp_microadam.workbench.data.catalogue import KNOWN_DATA, takes_columns
    from dp_microadam.workbench.recipes.recipe_files import known_recipes, load_recipe

    if options.name in KNOWN_DATA and not takes_columns(options.name):
        return None
    return load_recipe(options.name) if options.name.endswith(".toml") or options.name in known_recipes() else None


def _check_table(recipe: Recipe | None, folder: str | None) -> tuple[list[str], list[str]]:
    from dataclasses import replace

    from dp_microadam.workbench.data.dataset import LabelledData
    from dp_microadam.workbench.data.table_check import check_table
    from dp_microadam.workbench.recipes.assemble import load_data, number_of_units

    if recipe is None:
        raise InputError(
            "a table is checked with its recipe, which says what its columns are; dp-microadam data check FILE.csv --suggest "
            "writes a first one"
        )

    def load() -> LabelledData:
        data = load_data(replace(recipe, data_folder=folder or ""))
        number_of_units(recipe, data)
        return data

    found = check_table(recipe.data, folder, recipe.columns, recipe.data_options, load, recipe.data_memory_gib)
    return found.problems, found.notes


def _suggest(options: argparse.Namespace) -> int:
    from dp_microadam.workbench.recipes.suggestion import suggest

    if not options.suggest:
        raise InputError(f"{options.name} is a table; add --suggest to get a first recipe for it, then check that recipe")
    print(suggest(Path(options.name), options.label), end="")
    return 0


@contextmanager
def _progress(download: Download) -> Iterator[Progress]:
    """Download progress on stderr: a bar on a terminal, otherwise a line every few seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    if not sys.stderr.isatty():
        with _counter("bytes", download.name) as count:
            yield lambda done, total: count(done, total or 0)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(download.name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _counter(unit: str, name: str = "") -> Iterator[Any]:
    """Print every few seconds how many items are done, of how many."""
    last = time.monotonic()
    interval = _REFRESH_SECONDS if sys.stderr.isatty() else _LINE_SECONDS

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last < interval:
            return
        last = time.monotonic()
        end = "\r" if sys.stderr.isatty() else "\n"
        print(f"{name} {done:,} of {total:,} {unit}".strip(), end=end, file=sys.stderr, flush=True)

    yield tell
