"""Train a model: `python train.py [key=value ...]`. The same command resumes an interrupted run.

`python train.py --help` lists groups and keys; `-m` trains every point of an experiment or sweep. This script is the
same as `depthlm train`. The shell completion of fish looks for the text @hydra.main in this file.
"""

import sys

from depthlm.__main__ import main

if __name__ == "__main__":
    main("train", sys.argv[1:], "train.py")
