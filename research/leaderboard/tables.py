"""The tables and the picture of the leaderboard, from its lines of results; what is said of them is computed here, too."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from research.leaderboard.problems import PROBLEMS
from research.leaderboard.runs import DEFAULT, ENTRANTS, SEEDS, THRESHOLD, Run, best_rate, read, runs_of

PAPER, ORACLE = "paper", "oracle"


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, and half the width of its 95 % interval (Student's t).

    >>> Difference.of([2.0, 3.0, 4.0], [1.0, 1.0, 1.0]).shown()
    '+2.0 ± 2.5'
    """

    mean: float
    half: float
    pairs: int

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Difference:
        from scipy.stats import t

        differences = [a - b for a, b in zip(ours, theirs, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        return cls(statistics.mean(differences), float(t.ppf(0.975, len(differences) - 1)) * error, len(differences))

    @property
    def certain(self) -> bool:
        """Whether the interval excludes zero."""
        return abs(self.mean) > self.half

    def shown(self) -> str:
        digits = 1 if self.half >= 0.095 else 2
        text = f"{signed(self.mean, digits)} ± {self.half:.{digits}f}"
        return f"**{text}**" if self.certain else text


def signed(value: float, digits: int) -> str:
    """A difference with its sign; what rounds to nothing has none.

    >>> signed(-0.04, 1), signed(-0.06, 1)
    ('0.0', '−0.1')
    """
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text if text.strip("+−0.") else text[1:]


class Leaderboard:
    """The accuracies of all runs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.lines = read(folder)
        self.known = {run: float(line["accuracy"]) for run, line in self.lines.items()}

    def rows(self) -> list[tuple[str, float]]:
        """The problems and ε that the default was run at, in the order of the problems."""
        found = {(run.problem, run.epsilon) for run in self.known if run.entrant == DEFAULT}
        return sorted(found, key=lambda row: (list(PROBLEMS).index(row[0]), row[1]))

    def accuracies(self, problem: str, epsilon: float, entrant: str, rate: float | None) -> list[float]:
        """By seed, in ascending order; empty unless all seeds were run."""
        runs = [Run(problem, epsilon, entrant, rate, seed) for seed in range(1, SEEDS + 1)]
        return [self.known[run] for run in runs] if all(run in self.known for run in runs) else []

    def default(self, problem: str, epsilon: float) -> list[float]:
        return self.accuracies(problem, epsilon, DEFAULT, None)

    def at_distance(self, problem: str, epsilon: float, entrant: str, distance: float) -> list[float]:
        """Accuracies of a method with a distance; those of dp-threshold at the problem's own are the default's."""
        if (entrant, distance) == (THRESHOLD, PROBLEMS[problem].distance):
            return self.default(problem, epsilon)
        return self.accuracies(problem, epsilon, entrant, distance)

    def rival(self, problem: str, epsilon: float, entrant: str, kind: str) -> tuple[list[float], float | None]:
        """Accuracies of a rival at its paper's rate or that of the oracle, and that rate.

        The oracle takes the rate with the best first seed, or its paper's if that has the better mean.
        """
        rates = ENTRANTS[entrant].rates
        rate = PROBLEMS[problem].distance if ENTRANTS[entrant].distances else rates[0]
        found = self.accuracies(problem, epsilon, entrant, rate)
        if kind == PAPER:
            return found, rate
        if next(runs_of(problem, epsilon, entrant, self.known), None) is not None:
            return [], None
        best = best_rate(problem, epsilon, entrant, self.known)
        tuned = self.accuracies(problem, epsilon, entrant, best)
        return (found, rate) if statistics.mean(found) > statistics.mean(tuned) else (tuned, best)


def columns() -> Iterator[tuple[str, str, str]]:
    """Rivals as columns: title, entrant, and at which rate."""
    for name, entrant in ENTRANTS.items():
        if name in (DEFAULT, THRESHOLD):
            continue
        if entrant.distances or len(entrant.rates) == 1:
            yield entrant.title, name, PAPER
            continue
        yield f"{entrant.title}, paper", name, PAPER
        yield f"{entrant.title}, oracle", name, ORACLE


def table(board: Leaderboard) -> str:
    """The whole leaderboard as Markdown."""
    shown = list(columns())
    header = ["problem", "ε", "default", *(title for title, _, _ in shown), "published"]
    lines = [_row(header), "|:---|---:|" + "---:|" * (len(header) - 2)]
    for name, epsilon in board.rows():
        ours = board.default(name, epsilon)
        if not ours:
            continue
        entries = [_against(ours, *board.rival(name, epsilon, entrant, kind), kind) for _, entrant, kind in shown]
        published = dict(PROBLEMS[name].published).get(epsilon)
        told = "" if published is None else f"{published:g} ({PROBLEMS[name].source})"
        lines.append(_row([PROBLEMS[name].title, f"{epsilon:g}", f"{statistics.mean(ours):.1f}", *entries, told]))
    return "\n".join([*lines, "", facts(board)])


def _against(ours: Sequence[float], theirs: Sequence[float], rate: float | None, kind: str) -> str:
    if not theirs:
        return "–"
    at = f" at {rate:g}" if kind == ORACLE else ""
    return f"{statistics.mean(theirs):.1f}{at}<br>{Difference.of(ours, theirs).shown()}"


def _row(entries: Sequence[str]) -> str:
    return "| " + " | ".join(entries) + " |"


def facts(board: Leaderboard) -> str:
    """How many runs, of which commits, where and when."""
    if not board.lines:
        return "No runs yet."

    def distinct(key: str) -> str:
        return ", ".join(sorted({str(line[key]) for line in board.lines.values()}))

    return f"{len(board.lines):,} runs on {distinct('date')}, {distinct('machine')}, commits {distinct('commit')}."


def verdicts(board: Leaderboard) -> str:
    """In how many rows the default is certainly ahead of each rival, certainly behind, or neither."""
    lines = ["| beside | ahead | level | behind | mean difference | where behind |", "|:---|---:|---:|---:|---:|:---|"]
    for title, entrant, kind in columns():
        found = {}
        for problem, epsilon in board.rows():
            theirs, _ = board.rival(problem, epsilon, entrant, kind)
            if theirs and (ours := board.default(problem, epsilon)):
                found[problem, epsilon] = Difference.of(ours, theirs)
        if not found:
            continue
        ahead = sum(one.certain and one.mean > 0 for one in found.values())
        behind = {row: one for row, one in found.items() if one.certain and one.mean < 0}
        where = "; ".join(
            f"{PROBLEMS[name].title}, ε = {epsilon:g}: {one.shown().strip('*')}" for (name, epsilon), one in behind.items()
        )
        mean = signed(statistics.mean(one.mean for one in found.values()), 1)
        lines.append(_row([title, str(ahead), str(len(found) - ahead - len(behind)), str(len(behind)), mean, where]))
    return "\n".join(lines)


def threshold_table(board: Leaderboard) -> str:
    """Moves above a threshold minus dense steps, at each distance, and each at its best distance."""
    distances = sorted(rate for rate in ENTRANTS["dp-walk"].rates if rate is not None)
    header = ["problem", "ε", *(f"distance {one:g}" for one in distances), "each at its best", "best: threshold, dense"]
    lines = [_row(header), "|:---|---:|" + "---:|" * (len(header) - 2)]
    for problem, epsilon in board.rows():
        both = {
            name: {one: board.at_distance(problem, epsilon, name, one) for one in distances} for name in (THRESHOLD, "dp-walk")
        }
        sparse, dense = both.values()
        pairs = [(sparse[one], dense[one]) for one in distances]
        entries = [Difference.of(*pair).shown() if all(pair) else "–" for pair in pairs]
        told = ["–", "–"]
        if all(all(pair) for pair in pairs):
            best = [max(distances, key=lambda one: statistics.mean(found[one])) for found in (sparse, dense)]
            told = [Difference.of(sparse[best[0]], dense[best[1]]).shown()]
            told.append(
                f"{statistics.mean(sparse[best[0]]):.1f} at {best[0]:g}, {statistics.mean(dense[best[1]]):.1f} at {best[1]:g}"
            )
        if any(all(pair) for pair in pairs):
            lines.append(_row([PROBLEMS[problem].title, f"{epsilon:g}", *entries, *told]))
    return "\n".join(lines)


def draw(board: Leaderboard, path: Path) -> None:
    """The picture: a row per problem and ε, a mark per method, the default's as a bar with its range over seeds."""
    from matplotlib.figure import Figure

    rows = [(name, epsilon) for name, epsilon in board.rows() if board.default(name, epsilon)]
    figure: Any = Figure(figsize=(8.6, 0.8 + 0.36 * len(rows)), layout="constrained")
    axes = figure.subplots()
    marks = [
        ("DP-SGD, paper", "dp-sgd", PAPER, "s", "#e08e00", False),
        ("DP-SGD, best rate of a grid*", "dp-sgd", ORACLE, "s", "#e08e00", True),
        ("DP-Adam, paper", "dp-adam", PAPER, "^", "#00815f", False),
        ("DP-Adam, best rate of a grid*", "dp-adam", ORACLE, "^", "#00815f", True),
        ("DP-MicroAdam alone", "dp-microadam-alone", PAPER, "D", "#b3538b", False),
        ("Opacus, Adam", "opacus", PAPER, "X", "#6b7280", False),
    ]
    for title, entrant, kind, mark, colour, hollow in (one for one in marks if one[1] in ENTRANTS):
        found = [(board.rival(*row, entrant, kind)[0], place) for place, row in enumerate(rows)]
        points = [(statistics.mean(values), place) for values, place in found if values]
        if points:
            face = "none" if hollow else colour
            look = {"linestyle": "", "marker": mark, "markersize": 10 if hollow else 6, "color": colour}
            axes.plot(*zip(*points, strict=True), label=title, markerfacecolor=face, **look)
    for place, row in enumerate(rows):
        ours = board.default(*row)
        axes.plot([min(ours), max(ours)], [place, place], color="#0072b2", linewidth=6, alpha=0.35, solid_capstyle="round")
        label = "default (bar: five seeds)" if place == 0 else None
        axes.plot([statistics.mean(ours)], [place], "o", color="#0072b2", markersize=7, label=label)
    axes.set_yticks(range(len(rows)), [f"{PROBLEMS[name].title}, ε = {epsilon:g}" for name, epsilon in rows], fontsize=8.5)
    axes.invert_yaxis()
    axes.grid(axis="both", alpha=0.25)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("test accuracy (%), means of five runs", fontsize=9)
    title = "* chosen on test data, an oracle that nobody has"
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5, title=title, title_fontsize=8.5)
    figure.savefig(path, dpi=150, metadata={"Software": "dp-microadam"})
