"""The language model evaluation harness (lm-eval) on a run: zero-shot and few-shot accuracies."""

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
WITHOUT_HUB = """Without the hub:
  - where there is one: hf download --repo-type dataset <name> --local-dir <folder>/<name>, the name as above; bring the
    folder here, and add datasets=<folder>; or
  - bring the hub's cache from there, and point HF_HOME at it; or
  - give a task of your own on local files: tasks=<file>.yaml"""


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
    """Accuracies by the names of evaluation.json: `zero_shot/piqa`, `five_shot/average`, ...

    names: `paper`, `moda`, tasks that the harness knows, or YAML files of tasks. Each of a suite has the paper's
    metric; any other task has all of its metrics, as `zero_shot/<task>/<metric>`. shots: examples before the question.
    limit: of questions. datasets: a folder with the datasets, each under its name on the hub.
    Raises UserError for what the harness does not know or cannot have.
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
    # the harness's own tasks are thousands of files to read
    own = len(files) < len(names)
    manager = TaskManager(include_path=sorted({file.parent for file in files}), include_defaults=own)
    if tags := [task for task in asked if task in manager.all_tags]:
        raise UserError(f"tasks={tags[0]}: a tag, which is of several tasks; give their names")
    if unknown := [task for task in asked if task not in manager.all_tasks]:
        raise UserError(f"tasks={unknown[0]}: no task of the harness{nearest(unknown[0], manager.all_tasks)}")
    lm = HFLM(
        pretrained=as_causal_lm(model, config),
        tokenizer=as_tokenizer(run),
        batch_size=batch_size,
        mixed_precision_dtype="bfloat16" if precision == "bf16" else None,
        # a prompt longer than the context loses its beginning
        truncation=True,
    )
    found: dict[str, float] = {}
    # datasets looks at a folder of that name here before it asks the hub
    with contextlib.chdir(datasets) if datasets is not None else contextlib.nullcontext():
        _check_datasets(manager, asked)
        for count in shots or (suite.shots if suite else [0]):
            told = {
                task: simple_evaluate(
                    lm, tasks=[task], num_fewshot=count, limit=limit, task_manager=manager, bootstrap_iters=0
                )
                for task in asked
            }
            scores = {task: _metrics(results, task) for task, results in told.items()}
            found |= _named(f"{WORDS.get(count, str(count))}_shot", suite, scores)
    return found


def _check_datasets(manager: Any, tasks: Sequence[str]) -> None:
    """Raises UserError that names every task whose dataset cannot be had, before any is begun."""
    missing = []
    for task in tasks:
        try:
            manager.load(task)
        except (
            Exception
        ) as error:  # what it raises for a line of data or a key of the file that is wrong is of any kind
            missing.append(f"  - {task}: {(str(error).strip() or type(error).__name__).splitlines()[0]}")
    if missing:
        head = f"tasks=: {len(missing)} of {len(tasks)} tasks have no dataset here:"
        raise UserError("\n".join([head, *missing, WITHOUT_HUB]))


def _suite(names: Sequence[str]) -> tuple[Suite | None, list[str]]:
    """The suite, where one is asked for, and the names of all tasks in the harness."""
    suites = [name for name in names if name in SUITES]
    if suites and len(names) > 1:
        raise UserError(f"tasks={','.join(names)}: give {suites[0]} alone, or tasks")
    if suites:
        return SUITES[suites[0]], [task for task, _ in SUITES[suites[0]].tasks.values()]
    return None, [_task_of(Path(name)) if _is_file(name) else name for name in names]


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _task_of(file: Path) -> str:
    """The name in a task's file."""
    try:
        found = re.search(r"^task:\s*(\S+)", file.read_text(), re.MULTILINE)
    except (OSError, ValueError) as error:
        raise UserError(f"tasks={file}: cannot be read ({error})") from None
    if found is None:
        raise UserError(f"tasks={file}: no task of the harness, which has a line `task: <name>`")
    return found[1].strip("\"'")


def _metrics(told: Any, task: str) -> dict[str, float]:
    """The metrics of a task or group: `acc` of the harness's `acc,none`; that of another filter keeps its name."""
    numbers = (told.get("groups") or {}).get(task) or told["results"].get(task, {})
    found = {
        name.removesuffix(",none"): float(value)
        for name, value in numbers.items()
        if isinstance(value, int | float) and "stderr" not in name and "," in name
    }
    if not found:
        raise UserError(f"tasks={task}: a group without a score of its own; give its tasks by name")
    return found


def _named(prefix: str, suite: Suite | None, scores: dict[str, dict[str, float]]) -> dict[str, float]:
    if suite is None:
        return {f"{prefix}/{task}/{metric}": value for task, found in scores.items() for metric, value in found.items()}
    chosen = {name: scores[task][metric] for name, (task, metric) in suite.tasks.items()}
    return {f"{prefix}/{name}": value for name, value in chosen.items()} | {
        f"{prefix}/average": sum(chosen.values()) / len(chosen)
    }
