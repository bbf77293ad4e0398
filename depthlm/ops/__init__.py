"""Operators over depth: a folder for each, named as its mechanism, with its definition and faster implementations."""

from typing import Literal

# the values of `kernels=`
KernelChoice = Literal["auto", "triton", "torch", "naive"]
