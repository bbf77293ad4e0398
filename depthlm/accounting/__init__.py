"""Accounting: the parameters, FLOPs and memory of a decoder, and the overhead of its mechanism."""

from typing import TYPE_CHECKING

from depthlm.lazy import lazy_attributes

if TYPE_CHECKING:
    from depthlm.accounting.cost import count_parameters, flops_per_token
    from depthlm.accounting.memory import Memory, MemoryEstimator

__all__ = ["Memory", "MemoryEstimator", "count_parameters", "flops_per_token"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "Memory": "memory",
        "MemoryEstimator": "memory",
        "count_parameters": "cost",
        "flops_per_token": "cost",
    },
)
