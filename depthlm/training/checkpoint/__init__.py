"""Checkpoints and run directories: writing, restoring, and starting from other weights."""
