"""Inspection of a trained run: pictures and arrays of what its mechanism does over depth."""

from depthlm.inspect.collect import collect
from depthlm.inspect.command import Inspect, inspect_run

__all__ = ["Inspect", "collect", "inspect_run"]
