"""Prepare the token files of a corpus: `python data/prepare.py data=...`, the same as `depthlm prepare`."""

import sys
from pathlib import Path

# the package is next to this folder, even where it is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from depthlm.__main__ import main

if __name__ == "__main__":
    main("prepare", sys.argv[1:], "prepare.py")
