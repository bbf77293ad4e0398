"""`python -m depthlm doctor`: check whether a run would start on this machine."""
