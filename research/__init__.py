"""Research: the paper's experiments, its theorem, and studies of this library. Not part of the package.

``python -m research`` from a clone lists the commands.
"""
