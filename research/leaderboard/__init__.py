"""The leaderboard: this library's defaults beside other methods, with equal seeds, and what of the differences is certain."""
