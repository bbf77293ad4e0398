"""Submit a sweep as one SLURM job array: `python slurm/submit.py experiment=...`, the same as `depthlm submit`."""

import sys
from pathlib import Path

# find the package beside this folder even if it is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from depthlm.__main__ import main

if __name__ == "__main__":
    main("submit", sys.argv[1:], "submit.py")
