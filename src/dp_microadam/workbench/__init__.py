"""The applications on top of the library: command line, recipes, reports, audits, the paper's experiments and its theorem.

Nothing outside this folder imports it.
"""
