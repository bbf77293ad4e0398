"""The main job: `python train.py [key=value ...]` trains; the same command again resumes, or says that it is complete.

`python train.py --help` lists what can be composed; `-m` trains each point of an experiment, or of a sweep. It is the
same as `depthlm train`. The shell completion of fish looks for the text @hydra.main in this file.
"""

import sys

from depthlm.__main__ import main

if __name__ == "__main__":
    main("train", sys.argv[1:], "train.py")
