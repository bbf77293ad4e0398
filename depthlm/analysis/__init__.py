"""Accounting: parameters, FLOPs, memory, and the pictures and tables made of them."""

from typing import TYPE_CHECKING

from depthlm.lazy import lazy_attributes

if TYPE_CHECKING:
    from depthlm.analysis.curve import plot_loss
    from depthlm.analysis.flops import flops_per_token
    from depthlm.analysis.memory import Memory, MemoryEstimator
    from depthlm.analysis.parameters import count_parameters

__all__ = ["Memory", "MemoryEstimator", "count_parameters", "flops_per_token", "plot_loss"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "Memory": "memory",
        "MemoryEstimator": "memory",
        "count_parameters": "parameters",
        "flops_per_token": "flops",
        "plot_loss": "curve",
    },
)
