"""The commands train, prepare and runs, and the help."""
