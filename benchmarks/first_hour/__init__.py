"""The rungs of benchmarks/gpu.py: what has no script of its own, and the tables of README.md."""
