"""The subcommands of ``dp-microadam``.

A module has a function ``add_parser(subparsers)``, which declares the arguments and sets ``run`` to the function that does the
work. Heavy imports are inside that function, so that ``--help`` answers at once. To add a command, write its module and
name it in ``COMMANDS``, in the order in which ``--help`` lists them.
"""

COMMANDS = ("train", "tune", "export", "predict", "plan", "budget", "data", "report", "audit", "doctor")
