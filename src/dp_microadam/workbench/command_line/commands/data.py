"""``dp-microadam data``: list, download and check data sets, and remove features that were kept of them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dp_microadam.errors import DPMicroAdamError, InputError
from dp_microadam.workbench.command_line.arguments import add_json, complete_with, data_set_names
from dp_microadam.workbench.command_line.running import print_table

_LINE_SECONDS = 5.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "data",
        help="list, download and check data sets; remove kept features",
        description="List the known data sets and where they were found, download one, or check one.",
        epilog="examples:\n  dp-microadam data list\n  dp-microadam data get cifar10",
    )
    parser.set_defaults(run=lambda options: parser.print_help())
    actions = parser.add_subparsers(title="actions", metavar="ACTION")

    def action(name: str, run: Callable[[argparse.Namespace], int], help: str, *examples: str) -> argparse.ArgumentParser:
        epilog = "\n".join(["examples:", *(f"  dp-microadam data {example}" for example in examples)])
        found = actions.add_parser(name, help=help, epilog=epilog)
        add_json(found)
        found.set_defaults(run=run)
        return found

    about = "known data sets, where each was found, and whether its files match the published digests"
    action("list", run_list, about, "list --json")

    get = action("get", run_get, "download a data set from its publisher", "get mnist --folder data/mnist")
    complete_with(data_set_names, get.add_argument("name", metavar="NAME", help="name of a data set, as shown by `data list`"))
    get.add_argument("--folder", type=Path, metavar="DIR", help="target folder (default: where recipes look for it)")
    get.add_argument("--mirror", metavar="URL", help="base URL of a server with the same files; digests are still checked")

    about = "compare file digests, decode every image, read every row; of a recipe also who its users are"
    examples = ("image-folder --folder photographs --workers 2", "mine.toml")
    check = action("check", run_check, about, *(f"check {example}" for example in examples))
    name = "name of a data set, as in `data list`, or a recipe's name or TOML file"
    complete_with(data_set_names, check.add_argument("name", metavar="NAME", help=name))
    check.add_argument("--folder", metavar="DIR", help="folder of the data set (default: where recipes look for it)")
    check.add_argument("--workers", type=int, default=0, metavar="N", help="worker processes that decode images (default: 0)")

    about = "remove the features that recipes with cache_features kept; they are computed again when needed"
    clean = action("clean", run_clean, about, "clean")
    clean.add_argument("--folder", type=Path, metavar="DIR", help="folder of the features (default: the user's cache)")


def run_list(options: argparse.Namespace) -> int:
    from dp_microadam.workbench.data.catalogue import KNOWN_DATA, known
    from dp_microadam.workbench.data.sources import inspect

    found = [inspect(name) for name in KNOWN_DATA]
    if options.json:
        print(json.dumps([asdict(one) | {"summary": known(one.name).summary} for one in found], ensure_ascii=False))
        return 0
    rows = []
    for one in found:
        data = known(one.name)
        how = f"dp-microadam data get {one.name}" if data.downloads else data.by_hand
        rows.append((one.name, data.summary, one.state, str(one.place or how)))
    damaged = [f"{one.name}: {one.problems[0]}" for one in found if one.state == "damaged"]
    print_table("Data sets", ("", "", "", ""), rows, *damaged)
    return 0


def run_get(options: argparse.Namespace) -> int:
    from dp_microadam.workbench.data.catalogue import known, usual_folders
    from dp_microadam.workbench.data.published import NotFetched, fetch

    data = known(options.name)
    if not data.downloads:
        raise InputError(f"{options.name} cannot be downloaded: {data.by_hand}")
    folder: Path = options.folder or usual_folders(options.name)[0]
    digests = {name: data.digests[name] for name in data.downloads}
    urls = [options.mirror] if options.mirror else data.urls
    try:
        progress = sys.stderr.isatty()
        fetched = [fetch(name, digest, urls, folder, progress=progress) for name, digest in digests.items()]
    except NotFetched as error:
        wanted = ", ".join(f"{name} (sha256 {digest})" for name, digest in digests.items())
        raise DPMicroAdamError(
            f"{options.name} could not be fetched ({error}); if this machine has no network, put {wanted} into {folder}"
        ) from None
    except OSError as error:
        raise DPMicroAdamError(f"{folder} cannot be written to ({error.strerror or error}); name another by --folder") from None
    if options.json:
        print(json.dumps({"name": options.name, "folder": str(folder), "fetched": sum(fetched), "verified": True}))
    else:
        print(f"{options.name} {'fetched and verified' if any(fetched) else 'was there already, verified'}: {folder}")
    return 0


def run_check(options: argparse.Namespace) -> int:
    from dp_microadam.validation import require_integer
    from dp_microadam.workbench.data.catalogue import KNOWN_DATA, known, takes_columns
    from dp_microadam.workbench.data.sources import check
    from dp_microadam.workbench.recipes.recipe_files import known_recipes, load_recipe

    require_integer("workers", options.workers, 0)
    name: str = options.name
    settings: dict[str, Any] = {"workers": options.workers, "progress": _tell_images()}
    if name.endswith(".toml") or (name in known_recipes() and (name not in KNOWN_DATA or takes_columns(name))):
        from dp_microadam.workbench.recipes.assemble import load_settings, number_of_units

        recipe = load_recipe(name)
        folder = options.folder or recipe.data_folder or None
        settings |= {"further": lambda data: number_of_units(recipe, data), "unit_name": recipe.unit_name or "user"}
        found = check(recipe.data, folder, **settings, **load_settings(recipe))
    elif name.lower().endswith(".csv") or (name in KNOWN_DATA and takes_columns(name)):
        raise InputError(f"{name} is checked with its recipe, which says what its columns are; name the recipe's TOML file")
    else:
        found = check(name, options.folder, labelled=bool(known(name).classes), **settings)
    if options.json:
        print(json.dumps(asdict(found), ensure_ascii=False))
    elif found.problems:
        print("\n".join(found.problems))
    else:
        state = "in order" if found.state == "unverified" else found.state
        print("\n".join([f"{found.name} is {state}: {found.place}", *found.summary]))
    return 2 if found.state in ("missing", "yours") else int(bool(found.problems))


def run_clean(options: argparse.Namespace) -> int:
    from dp_microadam.training.frozen_features import FeatureStore

    store = FeatureStore(options.folder)
    freed = store.clean()
    if options.json:
        print(json.dumps({"folder": str(store.folder), "freed_bytes": freed}))
    else:
        print(f"{freed / 1e6:,.1f} MB of features removed from {store.folder}")
    return 0


def _tell_images() -> Callable[[int, int], None]:
    """Prints every few seconds on stderr how many images are decoded."""
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > _LINE_SECONDS:
            last = time.monotonic()
            print(f"{done:,} of {total:,} images", file=sys.stderr, flush=True)

    return tell
