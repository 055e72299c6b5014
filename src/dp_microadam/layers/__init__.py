"""Layers used by the models and supported by the clipping engine."""
