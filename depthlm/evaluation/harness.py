"""Zero-shot and few-shot accuracies of a run, measured with the language model evaluation harness (lm-eval)."""

import contextlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from depthlm.config import Config
from depthlm.config.validate.errors import nearest
from depthlm.errors import UserError
from depthlm.evaluation.tasks import SUITES, Suite
from depthlm.locations import install_command
from depthlm.model import Decoder

WORDS = {0: "zero", 1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 10: "ten"}
WITHOUT_HUB = """Without access to the hub, do one of the following:
  - on a machine with access, run hf download --repo-type dataset <name> --local-dir <folder>/<name>, with the name as
    above; copy the folder to this machine, and add datasets=<folder>
  - copy the hub's cache from such a machine, and point HF_HOME at it
  - give your own task on local files: tasks=<file>.yaml"""


def run_tasks(
    model: Decoder,
    config: Config,
    run: Path,
    names: Sequence[str],
    shots: Sequence[int] | None,
    batch_size: int,
    limit: int | None,
    datasets: Path | None,
    precision: str = "fp32",
) -> dict[str, float]:
    """Return accuracies by the names of evaluation.json: `zero_shot/piqa`, `five_shot/average`, ...

    names: `paper`, `moda`, tasks of the harness, or YAML files of tasks. A task of a suite has the paper's metric; any
    other task has all of its metrics, as `zero_shot/<task>/<metric>`. shots: numbers of examples before the question.
    limit: number of questions per task. datasets: a folder with the datasets, each under its name on the hub.
    Raises UserError for unknown tasks and for tasks whose dataset cannot be loaded.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError(f"tasks=: lm-eval is not installed; {install_command('evaluation')}") from None
    from depthlm.hugging_face import as_causal_lm, as_tokenizer

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    suite, asked = _suite(names)
    files = [Path(name).resolve() for name in names if _is_file(name)]
    # the harness's own tasks are thousands of files, so they are only read if needed
    needs_defaults = len(files) < len(names)
    manager = TaskManager(include_path=sorted({file.parent for file in files}), include_defaults=needs_defaults)
    if tags := [task for task in asked if task in manager.all_tags]:
        raise UserError(f"tasks={tags[0]}: this is a tag of several tasks; give the names of the tasks")
    if unknown := [task for task in asked if task not in manager.all_tasks]:
        raise UserError(f"tasks={unknown[0]}: no task of the harness{nearest(unknown[0], manager.all_tasks)}")
    lm = HFLM(
        pretrained=as_causal_lm(model, config),
        tokenizer=as_tokenizer(run),
        batch_size=batch_size,
        mixed_precision_dtype="bfloat16" if precision == "bf16" else None,
        # truncates a prompt that is longer than the context on the left
        truncation=True,
    )
    accuracies: dict[str, float] = {}
    # `datasets` prefers a folder of the dataset's name in the working directory to the hub
    with contextlib.chdir(datasets) if datasets is not None else contextlib.nullcontext():
        _check_datasets(manager, asked)
        for count in shots or (suite.shots if suite else [0]):
            outputs = {
                task: simple_evaluate(
                    lm, tasks=[task], num_fewshot=count, limit=limit, task_manager=manager, bootstrap_iters=0
                )
                for task in asked
            }
            scores = {task: _metrics(output, task) for task, output in outputs.items()}
            accuracies |= _named(f"{WORDS.get(count, str(count))}_shot", suite, scores)
    return accuracies


def _check_datasets(manager: Any, tasks: Sequence[str]) -> None:
    """Raise a UserError that lists every task whose dataset cannot be loaded, before any task is run."""
    missing = []
    for task in tasks:
        try:
            manager.load(task)
        except Exception as error:  # the harness has no common type for errors in data or in task files
            missing.append(f"  - {task}: {(str(error).strip() or type(error).__name__).splitlines()[0]}")
    if missing:
        head = f"tasks=: {len(missing)} of {len(tasks)} tasks have no dataset here:"
        raise UserError("\n".join([head, *missing, WITHOUT_HUB]))


def _suite(names: Sequence[str]) -> tuple[Suite | None, list[str]]:
    """Return the requested suite, if any, and the harness's names of all tasks."""
    suites = [name for name in names if name in SUITES]
    if suites and len(names) > 1:
        raise UserError(f"tasks={','.join(names)}: give {suites[0]} alone, or a list of tasks")
    if suites:
        return SUITES[suites[0]], [task for task, _ in SUITES[suites[0]].tasks.values()]
    return None, [_task_of(Path(name)) if _is_file(name) else name for name in names]


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _task_of(file: Path) -> str:
    """Return the name in a task's file."""
    try:
        match = re.search(r"^task:\s*(\S+)", file.read_text(), re.MULTILINE)
    except (OSError, ValueError) as error:
        raise UserError(f"tasks={file}: cannot be read ({error})") from None
    if match is None:
        raise UserError(f"tasks={file}: no task file of the harness; it must have a line `task: <name>`")
    return match[1].strip("\"'")


def _metrics(output: Any, task: str) -> dict[str, float]:
    """Return the metrics of a task or group. `acc,none` becomes `acc`; metrics of other filters keep their name."""
    numbers = (output.get("groups") or {}).get(task) or output["results"].get(task, {})
    metrics = {
        name.removesuffix(",none"): float(value)
        for name, value in numbers.items()
        if isinstance(value, int | float) and "stderr" not in name and "," in name
    }
    if not metrics:
        raise UserError(f"tasks={task}: this group has no score of its own; give the names of its tasks")
    return metrics


def _named(prefix: str, suite: Suite | None, scores: dict[str, dict[str, float]]) -> dict[str, float]:
    if suite is None:
        return {f"{prefix}/{task}/{metric}": value for task, own in scores.items() for metric, value in own.items()}
    chosen = {name: scores[task][metric] for name, (task, metric) in suite.tasks.items()}
    return {f"{prefix}/{name}": value for name, value in chosen.items()} | {
        f"{prefix}/average": sum(chosen.values()) / len(chosen)
    }
