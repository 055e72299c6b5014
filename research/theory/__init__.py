"""The convergence theorem of DP-MicroAdam as something to compute and to check."""
