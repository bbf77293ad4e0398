"""Sweeps: the points that `train.py -m`, `submit` and `report` share, and their table."""

from depthlm.sweeps.point import Point
from depthlm.sweeps.points import check_points, load_experiment, sweep_points

__all__ = ["Point", "check_points", "load_experiment", "sweep_points"]
