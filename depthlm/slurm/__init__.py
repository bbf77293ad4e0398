"""Sweeps as SLURM job arrays."""
