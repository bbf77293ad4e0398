"""`python -m depthlm evaluate`: the losses of a run, or its accuracies, into evaluation.json and W&B."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from rich import box
from rich.table import Table

from depthlm.config import Config
from depthlm.console import stdout_console
from depthlm.data import Tokenizer
from depthlm.errors import UserError
from depthlm.evaluation.validation_sets import folder_sets, measure_sets, run_sets
from depthlm.fields import key
from depthlm.files import replace_text
from depthlm.loading import load_checkpoint
from depthlm.machine.environment import DEVICES, usable_device
from depthlm.runs.trackers import start_tracker

EVALUATION = "evaluation.json"


@dataclass
class Evaluate:
    """What `evaluate` takes."""

    run: str = key(doc="run directory; its newest whole checkpoint is evaluated")
    tasks: Optional[list[str]] = key(
        None,
        "paper (Depth-Attention's eight), moda (MoDA's ten), tasks of lm-eval, or YAML files of tasks; null: losses",
    )
    shots: Optional[list[int]] = key(None, "examples before a question; null: the paper's (0,5 and 0), else 0")
    sets: Optional[list[str]] = key(None, "folders of token files to measure on; null: the run's validation sets")
    datasets: Optional[str] = key(
        None, "folder with the tasks' datasets, each under its name on the hub; null: the hub"
    )
    batch_size: int = key(16, "sequences at a time; changes no result", minimum=1)
    limit: Optional[int] = key(None, "only the first questions of each task, to try it out", minimum=1)
    precision: str = key("fp32", "number format of the computation", choices=("fp32", "bf16"))
    device: str = key("auto", "auto: the GPU, or the CPU where there is none", choices=DEVICES)
    trust: Optional[list[str]] = key(None, "modules that the run's own mechanism may come from")


def evaluate(arguments: Evaluate) -> dict[str, Any]:
    """Measure, print, and write evaluation.json; what it holds then.

    Raises UserError for a run without a checkpoint, missing token files or datasets, another tokenizer's tokens.
    """
    directory = Path(arguments.run)
    _check(arguments)
    if arguments.datasets is not None and not Path(arguments.datasets).is_dir():
        raise UserError(f"datasets={arguments.datasets}: no such folder")
    device = torch.device(usable_device(arguments.device))
    model, config, manifest = load_checkpoint(directory, device, arguments.trust or ())
    if arguments.tasks is None:
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=arguments.precision == "bf16")
        tokenizer = Tokenizer.load(directory)
        sets = run_sets(config) if arguments.sets is None else folder_sets(arguments.sets, tokenizer)
        found: dict[str, Any] = measure_sets(
            model, sets, config.training.sequence_length, arguments.batch_size, autocast
        )
    else:
        from depthlm.evaluation.harness import run_tasks

        datasets = None if arguments.datasets is None else Path(arguments.datasets)
        found = run_tasks(
            model, config, directory, arguments.tasks, arguments.shots, arguments.batch_size, arguments.limit,
            datasets, arguments.precision,
        )  # fmt: skip
    _show(found)
    if arguments.limit is not None:
        # a part of the questions is not the task's score
        stdout_console().print(f"limit={arguments.limit}: a try, not written to {EVALUATION}", markup=False)
        return found
    return _keep(directory, config, manifest, found)


def _check(arguments: Evaluate) -> None:
    """Raises UserError for keys that do not go together."""
    if arguments.tasks is None:
        idle = [name for name in ("shots", "datasets", "limit") if getattr(arguments, name) is not None]
        if idle:
            raise UserError(f"{idle[0]}=: goes with tasks=")
    elif arguments.sets is not None:
        raise UserError("sets=: losses are measured on them, tasks have their own data; give sets= or tasks=")
    if min(arguments.shots or [0]) < 0:
        raise UserError(f"shots={','.join(map(str, arguments.shots or []))}: must be at least 0")


def _keep(directory: Path, config: Config, manifest: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Add to evaluation.json, in which all numbers are of one checkpoint, and to the run's W&B."""
    path = directory / EVALUATION
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):
        before = {}
    kept = before if isinstance(before, dict) and before.get("step") == manifest["step"] else {}
    told = {"step": manifest["step"]} | kept | found
    try:
        replace_text(path, json.dumps(told, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error}); the numbers are above") from None
    if config.tracker.name != "none" and manifest.get("wandb_id"):
        tracker = start_tracker(config.tracker, directory, directory.name, asdict(config), manifest["wandb_id"])
        tracker.close(told)
    stdout_console().print(f"written: {path}", markup=False, soft_wrap=True)
    return told


def _show(found: dict[str, Any]) -> None:
    table = Table("", "", box=box.SIMPLE, show_header=False)
    for name, value in found.items():
        table.add_row(name, "-" if value is None else f"{value:.4f}", end_section=name.endswith("average"))
    stdout_console().print(table)
