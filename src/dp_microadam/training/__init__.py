"""The training loop: what turns a model, an optimizer and a privacy plan into a private model and the record of a run."""
