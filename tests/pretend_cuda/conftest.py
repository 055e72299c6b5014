"""The battery is a program of its own: the pretend device must be there before torch is."""

collect_ignore = ["battery.py"]
