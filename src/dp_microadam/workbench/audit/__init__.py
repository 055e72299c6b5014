"""Empirical privacy audits: membership-inference attacks that yield lower bounds on the ε of the training pipeline.

Each bound holds with a stated confidence. A bound above the claimed ε refutes the claim; a bound below it proves nothing.
"""
