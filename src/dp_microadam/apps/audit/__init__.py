"""Empirical audits: attacks on the pipeline that would succeed if its privacy claim were wrong.

An audit yields a lower bound on ε that holds with a stated confidence. A bound above the claim proves a fault; a bound below
it proves nothing, and says how close the attack came.
"""
