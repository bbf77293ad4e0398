"""Validation of a configuration, and the explanation of each mistake."""
