"""The subcommands of ``dp-microadam``, one module each.

A module has ``add_parser(subparsers)``, which declares the arguments and sets ``run`` to the function that does the
work. Modules import what is heavy inside that function, so that ``--help`` answers at once. To add a command, write
its module and name it in ``COMMANDS``, in the order ``--help`` shows.
"""

COMMANDS = (
    "train",
    "resume",
    "evaluate",
    "export",
    "plan",
    "budget",
    "data",
    "report",
    "reproduce",
    "audit",
    "theory",
    "doctor",
    "completion",
)
