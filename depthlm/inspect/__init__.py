"""Inspection of a trained run: pictures and arrays of what its mechanism does over depth."""

from depthlm.inspect.collect import collect
from depthlm.inspect.command import Inspect, inspect_run
from depthlm.inspect.depth_mixing import depth_mixing

__all__ = ["Inspect", "collect", "depth_mixing", "inspect_run"]
