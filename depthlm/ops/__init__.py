"""Operators over depth: a folder for each, named as its mechanism, with its definition and faster implementations."""

# the allowed values of `kernels=`
CHOICES = ("auto", "triton", "torch", "naive")
