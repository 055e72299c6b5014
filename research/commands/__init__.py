"""The commands of ``python -m research``, one module each."""
