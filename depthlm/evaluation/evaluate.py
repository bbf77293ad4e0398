"""The command `python -m depthlm evaluate`: record the losses, bits per byte or accuracies of a run."""

import json
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import chdir, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich import box
from rich.progress import track
from rich.table import Table

from depthlm.build import load_checkpoint
from depthlm.config import Config
from depthlm.config.saved import check_reach
from depthlm.console import stdout_console
from depthlm.counts import format_count
from depthlm.data import DataError, DocumentRows, Manifest, TokenFiles, Tokenizer, open_corpus, validation_batches
from depthlm.data.manifest import Split
from depthlm.data.token_files import check_same_ids
from depthlm.errors import UserError
from depthlm.evaluation.harness import (
    SEED,
    averages,
    check_datasets,
    check_suite,
    hub_or_cache,
    jobs_of,
    language_model,
    run_job,
    task_manager,
)
from depthlm.fields import key
from depthlm.files import read_json, replace_text
from depthlm.losses import TotalLoss, document_rows, total_loss
from depthlm.machine.environment import Device, usable_device
from depthlm.model import Decoder
from depthlm.run_directory import RunDirectory
from depthlm.runs.records import ValidationLosses, finite, text_key


@dataclass
class Evaluate:
    """The arguments of `evaluate`."""

    run: str = key(doc="run directory; its newest valid checkpoint is evaluated")
    tasks: list[str] | None = key(
        None,
        "paper (Depth-Attention's eight), moda (MoDA's ten), lm-eval tasks, python_words (needs no download), or YAML "
        "files of tasks; null: losses",
    )
    shots: list[int] | None = key(None, "examples before a question; null: 0, and 0,5 for tasks=paper")
    sets: list[str] | None = key(None, "folders of token files to measure on; null: the run's validation sets")
    datasets: str | None = key(None, "folder with the tasks' datasets, each under its name on the hub; null: the hub")
    batch_size: int = key(16, "sequences per batch; does not affect the results", minimum=1)
    limit: int | None = key(None, "use only the first questions of each task, for a quick try", minimum=1)
    precision: Literal["fp32", "bf16"] = key("fp32", "dtype of the computation")
    device: Device = key("auto", "auto: the GPU if there is one, else the CPU")
    trust: list[str] | None = key(None, "modules of the run's own mechanism; run: also sets of another user's run")


def evaluate(arguments: Evaluate) -> dict[str, Any]:
    """Evaluate a run, print the results and add them to evaluation.json. Returns the new content of evaluation.json.

    Results are written as soon as they exist. Raises UserError for a run without a checkpoint, missing token files or
    datasets, or tokens of another tokenizer; SystemExit with code 1, after the other tasks, if a task fails.
    """
    directory = Path(arguments.run)
    _check(arguments)
    if arguments.datasets is not None and not Path(arguments.datasets).is_dir():
        raise UserError(f"datasets={arguments.datasets}: no such folder")
    device = torch.device(usable_device(arguments.device))
    model, config, manifest = load_checkpoint(directory, device, arguments.trust or ())
    results, failures = dict[str, Any](), dict[str, str]()
    if arguments.tasks is None:
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=arguments.precision == "bf16")
        tokenizer = Tokenizer.load(directory)
        if arguments.sets is None:
            check_reach(directory, config, arguments.trust or (), lambda name: name.startswith("data."))
            sets = run_sets(config, tokenizer)
        else:
            sets = folder_sets(arguments.sets, tokenizer)
        for validation_set in sets:
            if validation_set.split.hides_text:
                share = f"{validation_set.split.unknown_share:.1%} of its tokens are unknown, and hide text"
                note = f"{validation_set.name}: {share}: it has no bits per byte"
                stdout_console().print(note, markup=False, soft_wrap=True)
        length, documents = config.training.sequence_length, document_rows(config, tokenizer)
        results = measure_sets(model, sets, length, arguments.batch_size, autocast, documents)
    else:
        if arguments.limit is None:
            check_suite(arguments.tasks, results_of(RunDirectory(directory).evaluation, manifest.step))
        for scores in run_tasks(model, config, arguments, failures):
            results |= scores
            # a score on a part of the questions is not the task's score
            if arguments.limit is None:
                add_results(RunDirectory(directory).evaluation, manifest.step, scores)
    table = Table("", "", box=box.SIMPLE, show_header=False)
    for name, value in results.items():
        if not isinstance(value, str):
            table.add_row(name, "-" if value is None else f"{value:.4f}", end_section=name.endswith("average"))
    stdout_console().print(table)
    if arguments.limit is not None:
        stdout_console().print(f"limit={arguments.limit}: results are not written to evaluation.json", markup=False)
    elif results:
        path = RunDirectory(directory).evaluation
        results = add_results(path, manifest.step, results)
        stdout_console().print(f"written: {path}", markup=False, soft_wrap=True)
    if failures:
        listed = "\n".join(f"  - {key}: {why}" for key, why in failures.items())
        what = f"{format_count(len(failures), 'task')} failed, and the results of the others are kept"
        # the exit code is 1
        sys.exit(f"depthlm evaluate: {what}:\n{listed}")
    return results


def run_tasks(
    model: Decoder, config: Config, arguments: Evaluate, failures: dict[str, str]
) -> Iterator[dict[str, float]]:
    """Yield the accuracies of each task by the names of evaluation.json: `zero_shot/piqa`, `five_shot/average`, ...

    A task of a suite has the paper's metric; any other task has all of its metrics, as `zero_shot/<task>/<metric>`.
    failures: receives the reason of each job that fails, by its key. Raises UserError for unknown tasks and for tasks
    whose dataset cannot be loaded, before the first task.
    """
    names = arguments.tasks or []
    jobs, manager = jobs_of(names, arguments.shots), task_manager(names)
    lm = language_model(model, config, Path(arguments.run), arguments.batch_size, arguments.precision)
    # `datasets` prefers a folder of the dataset's name in the working directory to the hub
    folder = nullcontext() if arguments.datasets is None else chdir(arguments.datasets)
    results: dict[str, float] = {}
    with hub_or_cache(jobs):
        with folder:
            check_datasets(manager, jobs)
        for job in jobs:
            torch.manual_seed(SEED)
            try:
                with folder:
                    scores = run_job(lm, job, manager, arguments.limit)
            except (Exception, SystemExit) as error:  # code of the harness and of the task's author
                failures[job.key] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            results |= scores
            yield scores
    yield averages(names, results)


def _check(arguments: Evaluate) -> None:
    """Raise UserError for keys that cannot be combined."""
    if arguments.tasks is None:
        unused = [name for name in ("shots", "datasets", "limit") if getattr(arguments, name) is not None]
        if unused:
            raise UserError(f"{unused[0]}=: has an effect only with tasks=; give tasks=, or leave it out")
    elif arguments.sets is not None:
        raise UserError("sets=: only losses are measured on sets, and tasks have their own data; give sets= or tasks=")
    if min(arguments.shots or [0]) < 0:
        raise UserError(f"shots={','.join(map(str, arguments.shots or []))}: must be at least 0")


@dataclass(frozen=True)
class ValidationSet:
    """A tokenized validation set. split: its record."""

    name: str
    tokens: TokenFiles
    split: Split

    def bits_per_byte(self, total: TotalLoss) -> float | None:
        """Return a loss in bits per byte, which is comparable across tokenizers (the Pile, arXiv 2101.00027, 3.1).

        None if it is not finite, or unknown tokens hide some of the text.
        """
        return None if self.split.hides_text else finite(total.nats / math.log(2) / self.split.bytes)


def run_sets(config: Config, tokenizer: Tokenizer) -> list[ValidationSet]:
    """Return the validation sets of a run. Raises DataError without their token files, or for another tokenizer's."""
    corpus = open_corpus(config.data, tokenizer)
    return [
        ValidationSet(name, tokens, next(iter(corpus.manifests[name].validation.values())))
        for name, tokens in corpus.validation.items()
    ]


def folder_sets(folders: Iterable[str], tokenizer: Tokenizer) -> list[ValidationSet]:
    """Return the validation sets of folders of token files, named after the folders.

    Raises DataError for a folder that was prepared with another tokenizer than the run's, or two folders of one name.
    """
    sets: list[ValidationSet] = []
    for folder in map(Path, folders):
        if not Manifest.exists(folder):
            remedy = "Prepare them: python data/prepare.py with data.path=<folder> and the run's tokenizer, "
            raise DataError("sets=: no token files", folder, remedy + "data.tokenizer=<run directory>/tokenizer.json.")
        manifest = Manifest.read(folder)
        remedy = "Prepare it with the run's: data.tokenizer=<run directory>/tokenizer.json."
        check_same_ids(tokenizer, Tokenizer.load(folder), folder, remedy)
        if any(other.name == folder.name for other in sets):
            raise DataError("two folders of this name", folder, "Rename one: results are named after the folder.")
        (split,) = manifest.validation.values()
        tokens = TokenFiles(folder, split.files, manifest.dtype, vocab_size=manifest.vocab_size)
        sets.append(ValidationSet(folder.name, tokens, split))
    return sets


def measure_sets(
    model: Decoder,
    sets: Iterable[ValidationSet],
    sequence_length: int,
    batch_size: int,
    autocast: torch.autocast,
    documents: DocumentRows | None = None,
) -> dict[str, float | str | None]:
    """Return `validation/<set>/loss` in nats per token, `.../perplexity` and `.../bits_per_byte`; None if not finite
    or, for bits per byte, if unknown tokens hide some of the text. `.../text` names what was measured.

    A set is split into consecutive windows of sequence_length, the last one shorter, or into its documents. Every token
    except the first is a target exactly once, and the bytes are those of all targets.
    """
    device = next(model.parameters()).device
    losses: dict[str, float | str | None] = {}
    for validation_set in sets:
        name, tokens = validation_set.name, validation_set.tokens
        batches: Iterator = validation_batches(tokens, sequence_length, batch_size, documents=documents)
        count = -(-(len(tokens) - 1) // (sequence_length * batch_size)) if documents is None else None
        with autocast:
            shown = track(batches, f"{name}: {len(tokens):,} tokens", total=count, transient=True)
            total = total_loss(model, shown, device)
        losses |= ValidationLosses({name: finite(total.mean)}).row()
        losses[f"validation/{name}/bits_per_byte"] = validation_set.bits_per_byte(total)
        losses[text_key(name)] = validation_set.split.first_tokens(len(tokens))
    return losses


def results_of(path: Path, step: int) -> dict[str, Any]:
    """Return the content of evaluation.json if it has results of the checkpoint of a step, else {}."""
    results = read_json(path)
    return results if results.get("step") == step else {}


def add_results(path: Path, step: int, results: dict[str, Any]) -> dict[str, Any]:
    """Add results of the checkpoint of a step to evaluation.json, and return its content.

    Results of another checkpoint are dropped. Raises UserError if the file cannot be written.
    """
    recorded = {"step": step} | results_of(path, step) | results
    try:
        replace_text(path, json.dumps(recorded, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
    return recorded
