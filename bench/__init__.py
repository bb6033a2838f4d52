"""Benchmarks: run from the repository root, say `python -m bench.index`."""
