"""Attention over depth for several reads of the same sources."""
