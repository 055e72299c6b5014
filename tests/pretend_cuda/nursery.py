"""Runs cases on one copy of the project after the other, each in a fork of a process that has imported torch already.

Reads from standard input lines of JSON, the folder of a package and groups of cases with their names, and answers each with the
lines of :mod:`pretend_cuda.run` and a last one that says how the processes ended.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback

from pretend_cuda import build, device, run

SLOW_TO_IMPORT = ("torch", "numpy", "scipy.special", "dp_accounting", "hypothesis", "pytest", "pretend_cuda.watch")


def main() -> int:
    try:
        where = device.install()
    except build.CannotBuild as reason:
        print(reason, file=sys.stderr)
        return run.CANNOT_BUILD
    for name in SLOW_TO_IMPORT:
        importlib.import_module(name)
    print("{}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        codes = []
        for group, *names in asked["groups"]:
            child = os.fork()
            if child == 0:
                _run(asked["sources"], group, names, where)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            if codes[-1]:
                break
        print(json.dumps({"codes": codes}), flush=True)
    return 0


def _run(sources: str, group: str, names: list[str], where: str) -> None:
    """In the child: run the cases on the package found there, and end."""
    code = 1
    try:
        sys.path.insert(0, sources)
        if group in run.INTERPRETED and device.real_device() is None:
            os.environ["TRITON_INTERPRET"] = "1"
            sys.modules.pop("triton", None)
        code = run.run(group, names, where)
    except BaseException:
        error = traceback.format_exc(limit=-12)
        print(json.dumps({"case": "the import", "seconds": 0.0, "error": error}), flush=True)
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
