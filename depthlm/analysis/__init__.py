"""Accounting: parameters, FLOPs, memory, and the pictures and tables made of them."""

from depthlm.analysis.curve import plot_loss
from depthlm.analysis.flops import flops_per_token
from depthlm.analysis.memory import Memory, MemoryEstimator
from depthlm.analysis.overhead import overhead
from depthlm.analysis.parameters import count_parameters

__all__ = ["Memory", "MemoryEstimator", "count_parameters", "flops_per_token", "overhead", "plot_loss"]
