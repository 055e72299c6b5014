"""Triton's interpreter in place of a GPU: it reads tensors wherever they are, so a launch is looked at before it is run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def refuse_other_devices() -> None:
    """From now on, a kernel whose tensors are not on the current GPU is refused: on a real one it would read foreign memory."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        current = torch.device("cuda", torch.cuda.current_device())
        for given in (*args, *kwargs.values()):
            if isinstance(given, Tensor) and given.device != current:
                raise RuntimeError(f"kernel {self.fn.__name__} is started on {current} with a tensor on {given.device}")
        run(self, *args, **kwargs)

    GridExecutor.__call__ = launch
