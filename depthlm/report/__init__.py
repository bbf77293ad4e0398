"""Reports as Markdown and PNG: our results next to a paper's table or figure, and comparisons of any runs."""

from depthlm.report.command import report

__all__ = ["report"]
