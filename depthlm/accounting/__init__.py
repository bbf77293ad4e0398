"""Accounting: the parameters, FLOPs and memory of a decoder, and the overhead of its mechanism."""
