"""Layers that both the models and the clipping engine must know."""
