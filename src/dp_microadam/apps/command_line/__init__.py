"""The command ``dp-microadam``."""
