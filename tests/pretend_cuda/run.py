"""Runs a group of cases on the device, in a process of its own: ``python -m pretend_cuda.run GROUP [-x] [CASE …]`` from tests/.

A group is a module of ``pretend_cuda.cases`` with a table ``CASES`` of functions that take the device. Each case runs under
:class:`~pretend_cuda.watch.Watch`. A line of JSON per case says how it went; ``-x`` stops after the first that fails.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from importlib.util import find_spec

from pretend_cuda import build, device

CANNOT_BUILD = 77
"""Exit code if there is no device; the reason is on standard error."""

INTERPRETED = ("data", "kernels")
"""Groups that use Triton, whose kernels a pretend device cannot run; its interpreter can."""


def main(group: str, names: list[str]) -> int:
    """Run the cases and return the exit code."""
    try:
        where = device.install()
    except build.CannotBuild as reason:
        print(reason, file=sys.stderr)
        return CANNOT_BUILD
    return run(group, names, where)


def run(group: str, names: list[str], where: str) -> int:
    """Run the cases on the installed device; 1 if one failed."""
    import torch
    from pretend_cuda import interpreter
    from pretend_cuda.watch import Watch

    if device.real_device():  # results are compared with the CPU's
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    elif group in INTERPRETED and find_spec("triton"):
        interpreter.refuse_other_devices()
    cases = importlib.import_module(f"pretend_cuda.cases.{group}").CASES
    chosen, failed = [name for name in names if name != "-x"] or list(cases), False
    for name in chosen:
        begun, error, said = time.perf_counter(), None, None
        torch.manual_seed(0)
        try:
            with Watch() as watch:
                said = cases[name](torch.device(where))
            assert not watch.refusals, watch.refusals
        except Exception:
            error, failed = traceback.format_exc(limit=-12), True
        seconds = round(time.perf_counter() - begun, 2)
        print(json.dumps({"case": name, "group": group, "seconds": seconds, "error": error, "said": said}), flush=True)
        if failed and "-x" in names:
            break
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
