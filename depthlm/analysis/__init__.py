"""Accounting: parameters, FLOPs, memory, and the pictures and tables made of them."""

from depthlm.analysis.curve import plot_loss
from depthlm.analysis.flops import flops_per_token
from depthlm.analysis.memory import estimate_memory, memory_per_gpu
from depthlm.analysis.overhead import overhead
from depthlm.analysis.parameters import count_parameters

__all__ = ["count_parameters", "estimate_memory", "flops_per_token", "memory_per_gpu", "overhead", "plot_loss"]
