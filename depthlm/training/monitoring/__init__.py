"""Monitoring of a run: metrics, console output, profiles, sublayer norms."""
