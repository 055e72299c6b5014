"""A table of a model's layers and the strategies that were chosen for them, for people to read."""

from __future__ import annotations

import math

import torch

from dp_microadam.clipping.recording import Observed


def strategy_table(observed: Observed, device: torch.device) -> str:
    """One line for each layer: the strategy on the device, its estimated cost, and the memory it keeps."""
    rows = [("layer", "type", f"strategy on {device.type}", "cost ×", "kept kB/example")]
    for name, rule in {**observed.rules, **observed.operations}.items():
        estimate = rule.estimate
        kind = "operation" if name in observed.operations else type(rule.module).__name__
        if estimate is None:
            rows.append((name, kind, "keep", "-", "-"))
        else:
            cost = "-" if math.isnan(estimate.cost) else f"{estimate.cost / max(1.0, estimate.ordinary):.2f}"
            rows.append((name, kind, estimate.strategy, cost, f"{estimate.kept_bytes / 1e3:.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
