"""Timing and files of measurements, which scripts here share with those of research."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from research.measuring import add_options, deliver, seconds, tell, wall_clock, work_clock

__all__ = ["add_options", "deliver", "seconds", "tell", "wall_clock", "work_clock"]
