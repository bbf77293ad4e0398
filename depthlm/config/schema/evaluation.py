"""The keys of evaluations during training."""

from dataclasses import dataclass
from typing import Optional

from depthlm.fields import key


@dataclass
class Evaluation:
    """Evaluations of checkpoints during training: losses on other sets, and tasks of lm-eval."""

    every: Optional[int] = key(
        None,
        "steps between evaluations, a multiple of training.checkpoint_every; the last checkpoint of the run is "
        "evaluated as well; null: none",
        minimum=1,
    )
    tasks: Optional[list[str]] = key(
        None,
        "paper (Depth-Attention's eight), moda (MoDA's ten), lm-eval tasks, python_words (needs no download), or YAML "
        "files of tasks",
        outside=True,
    )
    shots: Optional[list[int]] = key(
        None, "examples before a question; null: 0,5 for tasks=paper and 0 for any other task"
    )
    sets: Optional[list[str]] = key(None, "folders of token files whose loss is measured in full", outside=True)
    batch_size: int = key(16, "sequences per batch of one rank; does not affect the results", minimum=1)
    limit: Optional[int] = key(None, "use only the first questions of each task", minimum=1)
