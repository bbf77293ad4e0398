"""Kimi Delta Attention (arXiv 2510.26692): the recurrence, its chunked form, and the functions around it."""
