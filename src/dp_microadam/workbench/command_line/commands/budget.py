"""``dp-microadam budget RUN…``: the joint (ε, δ) of several runs on the same dataset."""

from __future__ import annotations

import argparse
import json
import warnings
from typing import TYPE_CHECKING, Any

from dp_microadam.workbench.command_line.arguments import add_group_size, add_json, add_run
from dp_microadam.workbench.command_line.running import print_table

if TYPE_CHECKING:
    from dp_microadam.ledger.ledger import LedgerRecord


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "budget",
        help="joint privacy cost of several runs on the same dataset",
        description="Compose the ledgers of several runs on the same dataset into one (ε, δ).",
        epilog="examples:\n  dp-microadam budget runs/first runs/second --group-size 5\n"
        "  dp-microadam budget runs/mine --anchor 5f1d0c0a9be34d2f8a6b7c41e2d3f4a5",
    )
    add_run(parser, "runs", nargs="+", type=str, help="a run folder, or its ledger file")
    parser.add_argument("--delta", type=float, metavar="D", help="δ of the result; required if the runs have different ones")
    parser.add_argument(
        "--accountant", choices=("rdp", "pld"), help="accountant that determines ε (default: pld; rdp if a RUN is a search)"
    )
    add_group_size(parser)
    parser.add_argument(
        "--anchor",
        action="append",
        default=[],
        metavar="HASH",
        help="a last hash of a ledger that was printed, exported or published earlier; fails if no RUN contains it",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dp_microadam.errors import InputError, PrivacyWarning
    from dp_microadam.ledger.ledger import ledger_path, read_ledger
    from dp_microadam.plan.plan import require_delta
    from dp_microadam.validation import require_integer

    require_integer("group_size", options.group_size, 1)
    if options.delta is not None:
        require_delta(options.delta)
    records: dict[str, LedgerRecord] = {}
    files: set[tuple[int, int]] = set()
    for name in options.runs:
        _refuse_unprotected(name)
        path = ledger_path(name)
        file = path.stat().st_dev, path.stat().st_ino  # the same for links of both kinds
        if file in files:
            raise InputError(f"run {name!r} is named twice; each run must be named once")
        files.add(file)
        records[name] = read_ledger(path)
    anchors = [_find(anchor, records) for anchor in options.anchor]
    deltas = {record.plan.delta for record in records.values()}
    if options.delta is None and len(deltas) > 1:
        raise InputError(f"the runs have different deltas ({', '.join(f'{d:g}' for d in sorted(deltas))}); give --delta")
    _refuse_different_units(records)
    report = _compose(records, deltas.pop() if options.delta is None else options.delta, options)
    if anchors:
        report["anchors"] = anchors
    sizes = {record.plan.dataset_size for record in records.values()}
    if len(sizes) > 1:
        common = f"budgets add up only for {report['unit_name']}s in all of them"
        warnings.warn(f"the datasets have different sizes {sorted(sizes)}; {common}", PrivacyWarning, stacklevel=1)
    if not report["private"]:
        warnings.warn("at least one run is stamped not private, so nothing is guaranteed", PrivacyWarning, stacklevel=1)
    if options.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print(report)
    return 0


def _refuse_unprotected(run: str) -> None:
    """Raise InputError for a run without clipping and noise, which has no ledger."""
    from dp_microadam.errors import InputError
    from dp_microadam.ledger.ledger import LEDGER_NAME, run_folder
    from dp_microadam.ledger.statement import PRIVACY_NAME

    folder = run_folder(run)
    statement = folder / PRIVACY_NAME
    if not statement.is_file() or (folder / LEDGER_NAME).exists():
        return
    if '"ledger_head"' in statement.read_text(encoding="utf-8"):
        raise InputError(f"run {run!r} has a privacy statement and no {LEDGER_NAME}, as exports do; name the run's own folder")
    raise InputError(
        f"run {run!r} is not private: it was trained without clipping and noise, so no budget covers what it reveals about "
        "its data; leave it out, and do not publish it"
    )


def _refuse_different_units(records: dict[str, LedgerRecord]) -> None:
    """Raise InputError for runs whose ε are for different units; that for an example holds for runs that name theirs, too."""
    from dp_microadam.errors import InputError
    from dp_microadam.ledger.statement import unit_in_words

    units = {(record.plan.unit, record.settings.unit_name): name for name, record in records.items()}
    if all(unit == "example" for unit, _ in units):
        units.pop(("example", ""), None)
    if len(units) > 1:
        whom = [f"run {run!r} protects {unit_in_words(*unit)}" for unit, run in units.items()]
        raise InputError(f"{' and '.join(whom[:2])}, which do not add up; name runs of one unit at a time")


def _compose(records: dict[str, LedgerRecord], delta: float, options: argparse.Namespace) -> dict[str, Any]:
    from dp_microadam.accounting.costs import DEFAULT_ACCOUNTANT, epsilon, group_epsilon
    from dp_microadam.ledger.ledger import spent_together, steps_together
    from dp_microadam.plan.selection_plan import SelectionPlan

    spent = spent_together(records.values())
    searches = {name for name, record in records.items() if isinstance(record.plan, SelectionPlan)}
    chosen = options.accountant or ("rdp" if searches else DEFAULT_ACCOUNTANT)  # pld knows no selection
    report: dict[str, Any] = {
        "private": all(record.settings.private for record in records.values()),
        "unit": next(iter(records.values())).plan.unit,
        "unit_name": _name_of_units(records),
        "epsilon": epsilon(spent, delta, chosen),
        "delta": delta,
        "accountant": chosen,
        "steps_done": steps_together(records.values()),
        "group_size": options.group_size,
        "runs": [
            {
                "run": name,
                "private": record.settings.private,
                "epsilon": record.epsilon(delta, chosen),
                "sample_rate": record.plan.sample_rate,
                "noise_multiplier": record.plan.noise_multiplier,
                "steps_done": record.steps,
                "bands": record.plan.bands,
                "max_batch_size": record.plan.max_batch_size,
                "selected": name in searches,
                "id": record.run,
                "ledger_head": record.head,
            }
            for name, record in records.items()
        ],
        "copies": _copies(records),
    }
    if options.group_size > 1:
        report["group_epsilon"] = group_epsilon(spent, delta, options.group_size)
    return report


def _name_of_units(records: dict[str, LedgerRecord]) -> str:
    """What all runs call a unit: example, user, or the name that they all give it."""
    named = {record.settings.unit_name for record in records.values()}
    return (named.pop() if len(named) == 1 else "") or next(iter(records.values())).plan.unit


def _find(anchor: str, records: dict[str, LedgerRecord]) -> dict[str, Any]:
    """The run whose ledger contains a hash published earlier, and how many steps it had then; none of these is missing."""
    from dp_microadam.errors import InputError, PrivacyError
    from dp_microadam.ledger.ledger import is_head

    if not is_head(anchor):
        raise InputError(f"anchor is {anchor!r}; it must be 32 hexadecimal digits, as privacy.json has them in ledger_head")
    for name, record in records.items():
        steps = record.steps_at(anchor)
        if steps is not None:
            return {"anchor": anchor, "run": name, "steps": steps}
    raise PrivacyError(
        f"no ledger named here contains the hash {anchor}: either a ledger lost steps that were spent, or the hash belongs to "
        "another run or copy; restore the ledger that contains it"
    )


def _copies(records: dict[str, LedgerRecord]) -> list[dict[str, Any]]:
    """Groups of folders that are copies of the same run, with the number of steps they share."""
    by_run: dict[str, list[str]] = {}
    for name, record in records.items():
        if record.run is not None:
            by_run.setdefault(record.run, []).append(name)
    found = []
    for run, names in by_run.items():
        if len(names) > 1:
            histories = [set(records[name].links) for name in names]
            steps = {"shared_steps": len(set.intersection(*histories)), "steps_together": len(set.union(*histories))}
            found.append({"id": run, "runs": names, **steps})
    return found


def _print(report: dict[str, Any]) -> None:
    from dp_microadam.ledger.statement import round_up

    unit, runs = report["unit_name"], report["runs"]
    whom = "" if unit == "example" else f" for a {unit}"
    all_of_it = " with all their examples" if report["unit"] == "user" else ""
    rows = []
    for run in runs:
        spent = round_up(run["epsilon"], 4) + ("" if run["private"] else " (not private)")
        rows.append((run["run"], f"{run['sample_rate']:.6g}", f"{run['noise_multiplier']:g}", f"{run['steps_done']}", spent))
    notes = [f"{run['run']} is the best of a random number of runs; its ε covers the search" for run in runs if run["selected"]]
    for one in report["copies"]:
        names = f"{', '.join(one['runs'][:-1])} and {one['runs'][-1]}"
        shared = f"the {one['shared_steps']} steps that they share count once, {one['steps_together']} in total"
        notes.append(f"{names} are copies of the same run: {shared}")
    for one in report.get("anchors", ()):
        notes.append(f"anchor {one['anchor']} is in {one['run']}, after {one['steps']} steps; none of those is missing")
    stamp = "" if report["private"] else "not private: "
    spent = f"ε = {round_up(report['epsilon'], 4)} by {report['accountant']}, at δ = {report['delta']:g}"
    notes.append(f"{stamp}all runs together{whom}: {spent}")
    if (size := report["group_size"]) > 1:
        group = f"up to {size} {unit}s together" if whom else f"a person with up to {size} examples"
        how = "general group privacy" if any(run["bands"] > 1 or run["selected"] for run in runs) else "pld"
        notes.append(f"{group}: ε = {round_up(report['group_epsilon'], 4)} by {how}")
    title = f"Privacy spent{f',{whom}{all_of_it}' if whom else ''}, at δ = {report['delta']:g} by {report['accountant']}"
    print_table(title, ("run", "sample rate", "noise multiplier", "steps", "ε"), rows, *notes)
