"""Accounting: the parameters, FLOPs and memory of a decoder."""
