"""Tasks of lm-eval that need no download."""
