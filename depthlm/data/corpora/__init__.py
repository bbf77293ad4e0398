"""Corpora: where their text lies, and the documents in it."""
