"""Evaluate a checkpoint during training, on all ranks. A failure is logged, and training continues.

Each rank loads the checkpoint's weights into a model of its own, so an evaluation needs memory for one more copy of the
weights, needs no collective operation inside the model at any ZeRO stage, and leaves the trained model alone.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from depthlm.config import Config
from depthlm.data import Tokenizer, validation_batches
from depthlm.distributed.calls import Call, Send, serve
from depthlm.distributed.watchdog import Activity
from depthlm.evaluation.harness import Job, averages, check_datasets, jobs_of, language_model, run_job, task_manager
from depthlm.evaluation.perplexity import TotalLoss, local_loss
from depthlm.evaluation.results import add_results
from depthlm.evaluation.validation_sets import ValidationSet, folder_sets
from depthlm.loading import with_weights
from depthlm.run_directory import RunDirectory
from depthlm.runs.validation_losses import finite, perplexity

log = logging.getLogger("depthlm")

# what the harness asks of a language model
REQUESTS = ("loglikelihood", "loglikelihood_rolling", "generate_until")


def check_evaluation(config: Config, tokenizer: Tokenizer, starting: bool) -> None:
    """Raise UserError for tasks that do not exist, and for sets of another tokenizer.

    starting: whether the run is new. Only then datasets that cannot be loaded are an error, since a hub that is down
    must not keep a run from being resumed.
    """
    asked = config.evaluation
    if asked.every is None:
        return
    folder_sets(asked.sets or [], tokenizer)
    if asked.tasks:
        manager = task_manager(asked.tasks)
        if starting:
            check_datasets(manager, jobs_of(asked.tasks, asked.shots))


def missing_results(config: Config, row: Mapping[str, Any]) -> bool:
    """Return whether a row of metrics.jsonl lacks results of the evaluation of its checkpoint."""
    return bool(_missing_sets(config, row) or _missing_jobs(config, row))


def evaluate_checkpoint(
    config: Config,
    step: int,
    row: Mapping[str, Any],
    tokenizer: Tokenizer,
    receive: Callable[[dict[str, Any]], None],
    activity: Activity,
    stopping: Callable[[], bool],
    device: torch.device,
) -> bool:
    """Evaluate the checkpoint of a step; collective. Returns whether a rank had to stop before the end.

    row: the row of metrics.jsonl of that step; results that it has are not measured again. receive: gets the results as
    they come, on every rank. Whatever fails is logged and not raised.
    """
    copy = _Copy(config, step, tokenizer, activity, device)
    functions: dict[str, Callable[[Any], Any]] = {"load": copy.load, "loss": copy.loss}
    functions |= {name: partial(copy.compute, name) for name in REQUESTS}
    ranks, patience = torch.distributed.get_world_size(), 60 * config.training.stall_timeout

    def work(call: Call, send: Send) -> None:
        known = dict(row)
        call("load", None)
        for results in _results(config, known, tokenizer, call, ranks):
            known |= results
            send(results)
            log.info("evaluation of step %d: %s", step, _text(results))

    failure = serve(work, functions, receive, activity, stopping, patience, device)
    if failure:
        log.warning("the evaluation of step %d failed (%s); training continues", step, failure)
    del copy, functions
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return failure == ""


def record_results(config: Config, row: Mapping[str, Any]) -> None:
    """Write the results of the last checkpoint, which its row has, to evaluation.json."""
    results = {key: value for key, value in row.items() if key.startswith("evaluation/") or "_shot/" in key}
    # a score on a part of the questions is not the task's score
    if not results or config.evaluation.limit is not None:
        return
    path = RunDirectory.of(config.output_dir).evaluation
    try:
        add_results(path, row["step"], results)
    except OSError as error:
        log.warning("%s cannot be written (%s); metrics.jsonl has the results", path, error.strerror or error)


class _Copy:
    """This rank's model with the weights of a checkpoint, and what rank 0 can call on it."""

    def __init__(
        self, config: Config, step: int, tokenizer: Tokenizer, activity: Activity, device: torch.device
    ) -> None:
        self.config, self.tokenizer, self.activity, self.device = config, tokenizer, activity, device
        self.run = RunDirectory.of(config.output_dir)
        self.checkpoint = self.run.checkpoint(step)
        self.rank, self.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.lm: Any = None

    def load(self, _: None) -> None:
        """Load the weights."""
        self.model = with_weights(self.config, self.checkpoint, self.device)
        self.model.end_of_text = self.tokenizer.end_of_text if self.config.data.document_mask else None
        self.model.register_forward_hook(lambda *_: self.activity.go_on())

    def loss(self, folder: str) -> tuple[float, float]:
        """Return the loss of this rank's part of a set in nats, and the number of its targets."""
        (one,) = folder_sets([folder], self.tokenizer)
        asked, name = self.config.evaluation, self.config.precision.name
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        length = self.config.training.sequence_length
        batches = validation_batches(one.tokens, length, asked.batch_size, rank=self.rank, ranks=self.ranks)
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            nats, tokens = local_loss(self.model, batches, self.device).tolist()
        return nats, tokens

    def compute(self, name: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Return this rank's results of the harness's requests of a kind."""
        from depthlm.evaluation.shared_lm import own_part

        if self.lm is None:
            batch_size, precision = self.config.evaluation.batch_size, self.config.precision.name
            self.lm = language_model(self.model, self.config, self.run.path, batch_size, precision)
        return own_part(self.lm, name, arguments, self.rank, self.ranks)


def _results(
    config: Config, known: dict[str, Any], tokenizer: Tokenizer, call: Call, ranks: int
) -> Iterator[dict[str, Any]]:
    """Yield the results that are not known yet, each as it is measured. known: grows while this runs."""
    for folder in _missing_sets(config, known):
        (one,) = folder_sets([folder], tokenizer)
        parts = call("loss", folder)
        yield _losses(one, TotalLoss(sum(nats for nats, _ in parts), int(sum(tokens for _, tokens in parts))))
    if not (jobs := _missing_jobs(config, known)):
        return
    import lm_eval.api.task
    from tqdm import tqdm

    from depthlm.evaluation.shared_lm import SharedLM

    # a bar for each task would interrupt that of the run
    lm_eval.api.task.tqdm = partial(tqdm, disable=True)
    names = config.evaluation.tasks or []
    lm, manager = SharedLM(call, ranks), task_manager(names)
    for job in jobs:
        try:
            yield run_job(lm, job, manager, config.evaluation.limit)
        except Exception as error:
            log.warning("%s cannot be evaluated (%s); training continues", job.key, error)
    if missing := {key: value for key, value in averages(names, known).items() if key not in known}:
        yield missing


def _missing_sets(config: Config, row: Mapping[str, Any]) -> list[str]:
    return [folder for folder in config.evaluation.sets or [] if f"{_set_prefix(folder)}/loss" not in row]


def _missing_jobs(config: Config, row: Mapping[str, Any]) -> list[Job]:
    asked = config.evaluation
    return [job for job in jobs_of(asked.tasks, asked.shots) if not job.is_in(dict(row))] if asked.tasks else []


def _set_prefix(folder: str) -> str:
    return f"evaluation/{Path(folder).name}"


def _losses(one: ValidationSet, total: TotalLoss) -> dict[str, float | None]:
    prefix, loss = f"evaluation/{one.name}", finite(total.mean)
    bits = finite(total.bits_per_byte(one.bytes))
    return {f"{prefix}/loss": loss, f"{prefix}/perplexity": perplexity(loss), f"{prefix}/bits_per_byte": bits}


def _text(results: Mapping[str, float | None]) -> str:
    texts = {key: "not finite" if value is None else f"{value:.4f}" for key, value in results.items()}
    return ", ".join(f"{key} {text}" for key, text in texts.items())
