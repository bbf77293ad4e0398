"""Short runs whose file operations are recorded, and what is wrong with them after a crash."""

import copy
import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

import depthlm
from depthlm.errors import UserError
from depthlm.runs.checkpoints import newest_checkpoint
from depthlm.runs.directory import read_summary
from depthlm.runs.records import read_metrics
from depthlm.training import train
from depthlm.training.monitoring.metrics import MetricsFile

from ...crashes import Recorder, build, crashes

STEPS = 4
SMALL = ("size.hidden_size=8", "size.head_size=4", "size.intermediate_size=8", "size.num_layers=1",
         "training.checkpoint_every=1", "training.keep_last=1", "training.log_every=1", "training.sample=null",
         f"training.max_steps={STEPS}", "training.validate_every=2", "training.validation_tokens=64")  # fmt: skip


def train_recorded(overrides: list[str], root: Path, unsynced: str = "") -> int:
    """Train on this rank, and record the file operations below a folder."""
    with Recorder(root, root.with_name("events")).recording(unsynced):
        return train(depthlm.compose(overrides))


def wrong(folder: Path, marks: list[str], start: int = 0) -> str | None:
    """Return what is wrong with the run in `folder / "run"` after a crash, or None.

    start: the step at which it was forked.
    """
    run = folder / "run"
    steps = [int(found[1]) for mark in marks if (found := re.fullmatch(r"saved .*/step-(\d+)", mark))]
    try:
        checkpoint = newest_checkpoint(run)
        summary = read_summary(run)
    except UserError as error:
        return str(error)
    step = start if checkpoint is None else checkpoint[1].step
    if step < (least := max(steps, default=start)):
        return f"step {least} was saved, and step {step} is there"
    if summary is not None and step < STEPS:
        return f"complete, and step {step} is there"
    if step == start:
        return None
    MetricsFile(run / "metrics.jsonl", step, checkpoint[1].row if checkpoint else None)
    rows = [row["step"] for row in read_metrics(run / "metrics.jsonl")]
    return None if rows == list(range(start + 1, step + 1)) else f"the rows of step {step} are {rows}"


def failures(
    root: Path, tmp_path: Path, every: Callable[[Path], None] = lambda _: None, start: int = 0
) -> tuple[int, list[str]]:
    """Return the number of states that a crash may leave, and what is wrong with some. every: called for each one.

    start: as in `wrong`.
    """
    found, count, load = [], 0, functools.cache(yaml.load)

    def load_once(text: str, *arguments: Any, **settings: Any) -> Any:
        """Parse each text once: the same configuration in every state would take half of the time."""
        return copy.deepcopy(load(text, *arguments, **settings))

    for count, (tree, marks) in enumerate(crashes(root.with_name("events")), 1):
        folder = tmp_path / f"state {count}"
        build(tree, folder)
        with mock.patch("depthlm.config.saved.yaml.load", load_once):
            reason = wrong(folder, marks, start)
        if reason:
            found.append(f"state {count}, after {marks[-1:]}: {reason}")
        else:
            every(folder)
        shutil.rmtree(folder)
    return count, found
