"""Studies: many runs that answer one question. Those of the paper, and those that go beyond it.

A study is a TOML file of this folder, ``NAME.SCALE.toml``: a recipe, axes along which it varies, and what the paper
reports. ``study.py`` reads it into cells, ``sweep.py`` runs them and collects what came out.
"""
