"""The exact sum of clipped per-example gradients, at little more than the cost of an ordinary gradient.

``engine.py`` holds :class:`~dp_microadam.clipping.engine.ClippedGradients`; each layer family has a file of its own.
``per_example.py`` is the slow reference implementation, which takes examples one at a time. ``independence.py`` checks before
the first step that examples do not interact in the model.
"""
