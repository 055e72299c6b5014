"""The command-line interface, ``dp-microadam``."""
