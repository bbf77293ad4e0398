"""The tables of `python -m depthlm summary`: what a model costs, and what its mechanism adds."""
