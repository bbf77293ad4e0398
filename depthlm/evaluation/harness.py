"""Zero-shot and few-shot accuracies of a run, measured with the language model evaluation harness (lm-eval)."""

import contextlib
import functools
import logging
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from depthlm.config import Config
from depthlm.data import Tokenizer
from depthlm.errors import UserError, nearest
from depthlm.locations import install_command
from depthlm.model import Decoder

WORDS = {0: "zero", 1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 10: "ten"}
WITHOUT_HUB = """Without access to the hub, do one of the following:
  - copy the hub's cache from a machine with access, and point HF_HOME at it
  - give your own task on local files: tasks=<file>.yaml, or evaluation.tasks=[<file>.yaml]
  - for `evaluate`: on a machine with access, run hf download --repo-type dataset <name> --local-dir <folder>/<name>,
    with the name as above; copy the folder to this machine, and add datasets=<folder>"""
# of the examples before a question, and of sampled answers; the default of the harness
SEED = 1234
AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}
# tasks that come with depthlm
SHIPPED = {file.stem: file for file in Path(__file__).parent.joinpath("shipped").glob("*.yaml")}


@dataclass(frozen=True)
class Job:
    """A task with a number of examples before each question.

    task: its name in the harness. name: its name in evaluation.json. metric: the only one that is reported; None: all.
    """

    task: str
    name: str
    metric: str | None
    shots: int

    @property
    def key(self) -> str:
        """The key of its result in evaluation.json if it has one metric, else the beginning of the keys."""
        return f"{WORDS.get(self.shots, self.shots)}_shot/{self.name}"

    def is_in(self, results: dict[str, Any]) -> bool:
        """Return whether results have those of this job."""
        known = [name for name, score in results.items() if score is not None]
        return self.key in known or any(name.startswith(f"{self.key}/") for name in known)


@dataclass(frozen=True)
class Suite:
    """The metric of each task, by its name in evaluation.json. `average` is over all tasks."""

    tasks: dict[str, str]
    shots: list[int] = field(default_factory=lambda: [0])


SUITES = {
    # Depth-Attention (arXiv 2606.05014), Table 1: "all downstream numbers are accuracies"
    "paper": Suite(
        dict.fromkeys(
            ("lambada", "piqa", "winogrande", "sciq", "hellaswag", "arc_easy", "arc_challenge", "race"), "acc"
        ),
        [0, 5],
    ),
    # MoDA (arXiv 2603.15619), section 4.2.2; it names no metrics, so these are those of OLMo's own evaluation
    "moda": Suite(
        {
            "piqa": "acc_norm",
            "hellaswag": "acc_norm",
            "winogrande": "acc",
            "openbookqa": "acc_norm",
            "boolq": "acc",
            "sciq": "acc",
            "arc_easy": "acc",
            "arc_challenge": "acc_norm",
            "copa": "acc",
            "mmlu": "acc",
        }
    ),
}
# tasks of suites that have another name in the harness
HARNESS_NAMES = {"lambada": "lambada_openai"}


def jobs_of(names: Sequence[str], shots: Sequence[int] | None) -> list[Job]:
    """Return the jobs of `paper`, `moda`, or tasks and YAML files of tasks. Raises UserError for a file without a task.

    shots: null: those of the suite, or 0.
    """
    suite = _suite(names)
    if suite is not None:
        counts = shots or suite.shots
        return [
            Job(HARNESS_NAMES.get(name, name), name, metric, n) for n in counts for name, metric in suite.tasks.items()
        ]
    tasks = [_task_of(Path(name)) if _is_file(name) else name for name in names]
    return [Job(task, task, None, n) for n in shots or [0] for task in tasks]


def averages(names: Sequence[str], results: dict[str, Any]) -> dict[str, float]:
    """Return the average of a suite at each number of shots of which the results have all tasks; {} without a suite."""
    suite = _suite(names)
    if suite is None:
        return {}
    found = {}
    for prefix in dict.fromkeys(key.partition("/")[0] for key in results if "_shot/" in key):
        values = [score for name in suite.tasks if (score := results.get(f"{prefix}/{name}")) is not None]
        if len(values) == len(suite.tasks):
            found[f"{prefix}/average"] = sum(values) / len(values)
    return found


def check_suite(names: Sequence[str], known: Mapping[str, Any]) -> None:
    """Raise UserError for a suite if known results have scores of another one, some of which have the same names."""
    if (suite := _suite(names)) is None:
        return
    for other, tasks in ((name, other.tasks.keys() - suite.tasks.keys()) for name, other in SUITES.items()):
        if any("_shot/" in key and key.partition("/")[2] in tasks for key in known):
            raise UserError(
                f"tasks={names[0]}: evaluation.json has scores of tasks={other}, some under the same names and with "
                "other metrics; move this file out of the run directory first"
            )


def task_manager(names: Sequence[str]) -> Any:
    """Return the harness's tasks, among them these. Raises UserError if lm-eval or a task does not exist."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError(f"tasks=: lm-eval is not installed; {install_command('evaluation')}") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    files = [Path(name).resolve() for name in names if _is_file(name)] + [SHIPPED[n] for n in names if n in SHIPPED]
    # the harness's own tasks are thousands of files, so they are read only if needed
    needs_defaults = len(files) < len(names)
    manager = TaskManager(include_path=sorted({file.parent for file in files}), include_defaults=needs_defaults)
    tasks = dict.fromkeys(job.task for job in jobs_of(names, None))
    if tags := [task for task in tasks if task in manager.all_tags]:
        raise UserError(f"tasks={tags[0]}: this is a tag of several tasks; give the names of the tasks")
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        known = [*manager.all_tasks, *SHIPPED, *SUITES]
        raise UserError(f"tasks={unknown[0]}: no task of the harness{nearest(unknown[0], known, cutoff=0.75)}")
    return manager


def language_model(model: Decoder, config: Config, run: Path, batch_size: int, precision: str) -> Any:
    """Return a decoder as the harness's language model. precision: fp32, or the dtype of its autocast."""
    from depthlm.evaluation.language_models import HarnessLM
    from depthlm.hugging_face.folder import as_causal_lm, as_tokenizer, unused_ids

    tokenizer, causal = as_tokenizer(Tokenizer.load(run)), as_causal_lm(model, config)
    causal.generation_config.suppress_tokens = unused_ids(model, tokenizer)
    # a row of a batch ends here; without it, it goes on until every row has ended
    causal.generation_config.eos_token_id = tokenizer.eos_token_id
    # a request that is scored reads no cache, and generation asks for one
    causal.config.use_cache = False
    return HarnessLM(
        pretrained=causal,
        tokenizer=tokenizer,
        batch_size=batch_size,
        mixed_precision_dtype=AUTOCAST.get(precision),
        # in bf16, a sum of log probabilities between 32 and 64 would be a multiple of 0.25
        softmax_dtype="float32",
    )


def run_job(lm: Any, job: Job, manager: Any, limit: int | None) -> dict[str, float]:
    """Return the results of a job by their names in evaluation.json. lm: a language model of the harness."""
    # simple_evaluate would list the installed packages of this machine, which takes seconds for each job
    from lm_eval.evaluator import evaluate

    loaded = load_tasks(manager, [job.task])
    for task in loaded["tasks"].values():
        if _allows_examples(task):
            task.set_config(key="num_fewshot", value=job.shots)
        task.set_fewshot_seed(seed=SEED)
    output = evaluate(lm=lm, task_dict=loaded, limit=limit, bootstrap_iters=0)
    metrics = _metrics(output, job.task)
    if job.metric is not None:
        return {job.key: metrics[job.metric]}
    return {f"{job.key}/{metric}": value for metric, value in metrics.items()}


def load_tasks(manager: Any, tasks: Any) -> Any:
    """Return tasks of the harness, of which some draw from global generators; the harness has the same seeds."""
    random.seed(0)
    np.random.seed(SEED)
    return manager.load(tasks)


def _allows_examples(task: Any) -> bool:
    """Return whether questions of a task of the harness may have examples before them; one that forbids them says 0."""
    return task.get_config("num_fewshot") != 0


def check_datasets(manager: Any, jobs: Sequence[Job]) -> None:
    """Raise a UserError, before any task is run, that lists every task whose dataset cannot be loaded.

    Also raises one for a task that allows no examples, if a job has some.
    """
    tasks, with_examples = list(dict.fromkeys(job.task for job in jobs)), {job.task for job in jobs if job.shots}
    missing, without = [], []
    for task in tasks:
        try:
            parts = load_tasks(manager, task)["tasks"].values()
            if task in with_examples and not any(map(_allows_examples, parts)):
                without.append(task)
        except Exception as error:  # the harness has no common type for errors in data or in task files
            missing.append(f"  - {task}: {(str(error).strip() or type(error).__name__).splitlines()[0]}")
    if missing:
        head = f"tasks=: {len(missing)} of {len(tasks)} tasks have no dataset here:"
        raise UserError("\n".join([head, *missing, WITHOUT_HUB]))
    if without:
        raise UserError(f"tasks={without[0]}: allows no examples before a question (num_fewshot: 0); give it shots=0")


@contextlib.contextmanager
def hub_or_cache(jobs: Sequence[Job]) -> Iterator[None]:
    """Let a hub that does not answer count as offline, where only its cache is used, instead of retrying every file."""
    from huggingface_hub import constants, get_session

    before = constants.HF_HUB_OFFLINE
    if any(job.task not in SHIPPED for job in jobs):
        try:
            get_session().head(constants.ENDPOINT, timeout=10)
        except Exception:  # of the client, of a proxy, or offline mode itself
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _suite(names: Sequence[str]) -> Suite | None:
    """Return the requested suite, if any. Raises UserError if there is something beside it."""
    suites = [name for name in names if name in SUITES]
    if suites and len(names) > 1:
        raise UserError(f"tasks={','.join(names)}: give {suites[0]} alone, or a list of tasks")
    return SUITES[suites[0]] if suites else None


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


@functools.cache
def _task_of(file: Path) -> str:
    """Return the name in a task's file, as it was when it was first read."""
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
