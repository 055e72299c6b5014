"""The parts that the privacy guarantee depends on: plan, accounting, sampling, noise and ledger.

This package works on numbers and tensors and does not know about models. ``plan`` and ``accounting`` do not import torch.
"""
