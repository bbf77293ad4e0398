"""Corpora: where their text is stored, and the documents in it."""
