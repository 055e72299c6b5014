"""Runs a group of cases on the device, in a process of its own: ``python -m pretend_cuda.run GROUP [CASE …]`` from tests/.

A group is a module of ``pretend_cuda.cases`` with a table ``CASES`` of functions that take the device. Each case runs under
:class:`~pretend_cuda.watch.Watch`. A line of JSON per case says how it went.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback

from pretend_cuda import build, device

CANNOT_BUILD = 77
"""Exit code if there is no device; the reason is on standard error."""


def main(group: str, names: list[str]) -> int:
    try:
        where = device.install()
    except build.CannotBuild as reason:
        print(reason, file=sys.stderr)
        return CANNOT_BUILD
    import torch
    from pretend_cuda.watch import Watch

    cases = importlib.import_module(f"pretend_cuda.cases.{group}").CASES
    failed = False
    for name in names or cases:
        begun, error, said = time.perf_counter(), None, None
        torch.manual_seed(0)
        try:
            with Watch():
                said = cases[name](torch.device(where))
        except Exception:
            error, failed = traceback.format_exc(limit=-12), True
        seconds = round(time.perf_counter() - begun, 2)
        print(json.dumps({"case": name, "seconds": seconds, "error": error, "said": said}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
