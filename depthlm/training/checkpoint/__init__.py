"""Checkpoints: saving, restoring, and initialization from other weights."""
