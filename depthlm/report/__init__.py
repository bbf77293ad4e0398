"""Reports: a paper's table or figure with ours beside it, and any runs side by side, as Markdown and PNG."""

from depthlm.report.command import report

__all__ = ["report"]
