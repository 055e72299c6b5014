"""A process of a search that a test kills: ``search_worker.py NOTES RUNS ARGUMENTS…`` runs the command line.

Every draw of the number of runs, which is then RUNS, and every run that begins or goes on is noted in the folder NOTES.
"""

import sys
from pathlib import Path

from dp_microadam.accounting.selection import Repetitions
from dp_microadam.training.search import PrivateSearch
from dp_microadam.workbench.command_line.cli import main


def note(what):
    with open(Path(sys.argv[1]) / what, "a", encoding="utf-8") as file:
        file.write("once\n")


def draw(self):
    note("draws")
    return int(sys.argv[2])


def one_run(self, *arguments, original=PrivateSearch._one_run):
    note("began")
    done = original(self, *arguments)
    note("completed")
    return done


if __name__ == "__main__":
    Repetitions.draw = draw
    PrivateSearch._one_run = one_run
    sys.exit(main(sys.argv[3:]))
