"""The exact sum of clipped per-example gradients, at nearly the price of an ordinary gradient.

``engine.py`` holds :class:`~dp_microadam.clipping.engine.ClippedGradients`; each layer family has a file of its own;
``per_example.py`` is the slow twin that takes examples one at a time.
"""
