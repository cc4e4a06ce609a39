"""Benchmarks: each runs ours and a peer or the physical limit in one run and prints a ratio."""
