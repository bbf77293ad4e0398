"""Scaling laws of each series of a sweep, and what the baseline needs for the losses of the others."""

from depthlm.report.scaling_laws.curves import VIEWS, Curve, Gap, Saving, Size, baseline_of, curves, gaps, savings
from depthlm.report.scaling_laws.fits import MIN_R2, Needed, PowerLaw, fit_power_law
from depthlm.report.scaling_laws.tables import (
    NEEDS,
    factor_text,
    fit_table,
    needed_text,
    paper_fit,
    remarks,
    savings_table,
)

__all__ = [
    "MIN_R2",
    "NEEDS",
    "VIEWS",
    "Curve",
    "Gap",
    "Needed",
    "PowerLaw",
    "Saving",
    "Size",
    "baseline_of",
    "curves",
    "factor_text",
    "fit_power_law",
    "fit_table",
    "gaps",
    "needed_text",
    "paper_fit",
    "remarks",
    "savings",
    "savings_table",
]
