"""Thin adapters for other people's loops: Hugging Face ``Trainer``, Lightning and Opacus. Each imports its host, and so its own
module: ``from dp_microadam.integrations.lightning import …``."""
