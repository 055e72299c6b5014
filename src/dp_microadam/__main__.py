"""``python -m dp_microadam`` is the ``dp-microadam`` command."""

import sys

from dp_microadam.workbench.command_line.cli import main

if __name__ == "__main__":
    sys.exit(main())
