"""Run directories: creating and locking them, reading their records and checkpoints, loss curves and trackers."""
