"""The Gaussian mechanism, correlated noise and the randomness behind them."""
