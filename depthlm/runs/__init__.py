"""Run directories as readers see them: the record of a run, and its loss curve."""
