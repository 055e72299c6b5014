"""Studies: many runs that answer one question. Those of the paper, and those that go beyond it.

A study is a TOML file of this folder, ``NAME.SCALE.toml``: a recipe, axes along which it varies, and what the paper
reports. :mod:`~dp_microadam.experiments.study` reads it into cells, :mod:`~dp_microadam.experiments.sweep` runs them and
collects what came out, :mod:`~dp_microadam.experiments.estimate` tells the hours before.
"""
