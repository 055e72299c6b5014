"""What the guarantee rests on: plan, accounting, sampling, noise and ledger.

This package knows numbers and tensors and nothing of models. ``plan`` and ``accounting`` import no torch.
"""
