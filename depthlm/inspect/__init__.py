"""Looking inside a trained run: what its mechanism does along depth, as pictures and as the arrays behind them."""

from depthlm.inspect.collect import collect
from depthlm.inspect.command import Inspect, inspect_run

__all__ = ["Inspect", "collect", "inspect_run"]
