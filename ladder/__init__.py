"""The ladder: attention in several languages, from a formula in NumPy to Hopper's peak. README.md lists the rungs."""
