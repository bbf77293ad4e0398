"""Measurements, each a script; README.md has the newest figures."""
