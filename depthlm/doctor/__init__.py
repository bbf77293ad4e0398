"""`python -m depthlm doctor`: what a run would meet on this machine, and what is wrong with it."""
