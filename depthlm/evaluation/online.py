"""Online evaluation: evaluate a checkpoint during training, on all ranks. A failure is logged, and training continues.

Each rank loads the checkpoint's weights into a second model. So an evaluation needs memory for another copy of the
weights, needs no collective operation inside the model at any ZeRO stage, and does not touch the trained model.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from depthlm.build import with_weights
from depthlm.config import Config
from depthlm.data import Tokenizer, validation_batches
from depthlm.distributed.calls import Call, Send, StoppedError, serve
from depthlm.distributed.watchdog import Activity
from depthlm.errors import UserError
from depthlm.evaluation.evaluate import add_results, folder_sets
from depthlm.evaluation.harness import (
    SEED,
    Job,
    averages,
    check_datasets,
    hub_or_cache,
    jobs_of,
    language_model,
    run_job,
    task_manager,
)
from depthlm.losses import TotalLoss, document_rows, local_loss
from depthlm.run_directory import RunDirectory
from depthlm.runs.records import finite, perplexity

log = logging.getLogger("depthlm")

# the key of the number of questions of each task, where it is limited
LIMIT = "evaluation/limit"
# what the harness asks of a language model
REQUESTS = ("loglikelihood", "loglikelihood_rolling", "generate_until")


def check_evaluation(config: Config, tokenizer: Tokenizer, starting: bool) -> None:
    """Raise UserError for tasks that do not exist, and for sets of another tokenizer.

    starting: whether the run is new. Only then datasets that cannot be loaded are an error, since a hub that is down
    must not keep a run from being resumed.
    """
    settings = config.evaluation
    if settings.every is None:
        return
    folder_sets(settings.sets or [], tokenizer)
    if not settings.tasks:
        return
    try:
        manager = task_manager(settings.tasks)
        if starting:
            jobs = jobs_of(settings.tasks, settings.shots)
            with hub_or_cache(jobs):
                check_datasets(manager, jobs)
    except UserError as error:
        raise UserError(re.sub(r"^tasks=", "evaluation.tasks=", str(error))) from None


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
    copy = _EvaluatedModel(config, step, tokenizer, activity, stopping, device)
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
    # a score on a part of the questions is not the task's score
    names = [key for key in row if key.startswith("evaluation/") or ("_shot/" in key and row.get(LIMIT) is None)]
    results = {name: row[name] for name in names if name != LIMIT and row[name] is not None}
    if not results:
        return
    try:
        add_results(RunDirectory.of(config.output_dir).evaluation, row["step"], results)
    except UserError as error:
        log.warning("%s; metrics.jsonl has the results", error)


@dataclass
class _EvaluatedModel:
    """This rank's model with the weights of a checkpoint, and what rank 0 can call on it."""

    config: Config
    step: int
    tokenizer: Tokenizer
    activity: Activity
    stopping: Callable[[], bool]
    device: torch.device
    lm: Any = None

    def load(self, _: None) -> None:
        """Load the weights."""
        checkpoint = RunDirectory.of(self.config.output_dir).checkpoint(self.step)
        self.model = with_weights(self.config, checkpoint, self.device)
        self.model.mask_documents(self.config.data.document_mask, self.tokenizer.end_of_text)
        # a layer, since the harness does not call the decoder as a whole
        self.model.layers[0].register_forward_hook(self.mark)

    def mark(self, *_: Any) -> None:
        """Mark progress at a batch. Raises StoppedError if this rank has to stop."""
        self.activity.mark_progress()
        if self.stopping():
            raise StoppedError

    def loss(self, folder: str) -> tuple[float, float]:
        """Return the loss of this rank's part of a set in nats, and the number of its targets."""
        (validation_set,) = folder_sets([folder], self.tokenizer)
        settings, name = self.config.evaluation, self.config.precision.name
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        place = {"rank": torch.distributed.get_rank(), "ranks": torch.distributed.get_world_size()}
        length = self.config.training.sequence_length
        documents = document_rows(self.config, self.tokenizer)
        batches = validation_batches(validation_set.tokens, length, settings.batch_size, documents=documents, **place)
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            nats, tokens = local_loss(self.model, batches, self.device).tolist()
        return nats, tokens

    def compute(self, name: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Return this rank's results of the harness's requests of a kind."""
        from depthlm.evaluation.language_models import compute_part

        if self.lm is None:
            run, precision = RunDirectory.of(self.config.output_dir).path, self.config.precision.name
            self.lm = language_model(self.model, self.config, run, self.config.evaluation.batch_size, precision)
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        # for sampled answers; a task may ask each question several times, once on each rank
        torch.manual_seed(SEED + rank)
        return compute_part(self.lm, name, arguments, rank, ranks)


def _results(
    config: Config, known: dict[str, Any], tokenizer: Tokenizer, call: Call, ranks: int
) -> Iterator[dict[str, Any]]:
    """Yield the results that are not known yet, each as it is measured. known: grows while this runs."""
    for folder in _missing_sets(config, known):
        (validation_set,) = folder_sets([folder], tokenizer)
        nats, tokens = map(sum, zip(*call("loss", folder), strict=True))
        total, name = TotalLoss(nats, int(tokens)), f"evaluation/{validation_set.name}"
        loss = finite(total.mean)
        losses = {f"{name}/loss": loss, f"{name}/perplexity": perplexity(loss)}
        if not validation_set.split.hides_text:
            losses[f"{name}/bits_per_byte"] = validation_set.bits_per_byte(total)
        yield losses
    if not (jobs := _missing_jobs(config, known)):
        return
    import lm_eval.api.task
    from tqdm import tqdm

    from depthlm.evaluation.language_models import SharedLM

    # a bar for each task would interrupt that of the run
    lm_eval.api.task.tqdm = partial(tqdm, disable=True)
    names, limit = config.evaluation.tasks or [], config.evaluation.limit
    lm, manager = SharedLM(call, ranks), task_manager(names)
    # scores on another number of questions go when the first new one comes
    stale = dict.fromkeys(key for key in known if "_shot/" in key) if known.get(LIMIT) != limit else {}
    for job in jobs:
        try:
            scores: dict[str, Any] = run_job(lm, job, manager, limit)
            yield stale | scores | ({LIMIT: limit} if known.get(LIMIT) != limit else {})
            stale = {}
        except Exception as error:
            log.warning("%s cannot be evaluated (%s); training continues", job.key, error)
    if missing := {key: value for key, value in averages(names, known).items() if known.get(key) is None}:
        yield missing


def _missing_sets(config: Config, row: Mapping[str, Any]) -> list[str]:
    return [folder for folder in config.evaluation.sets or [] if f"evaluation/{Path(folder).name}/loss" not in row]


def _missing_jobs(config: Config, row: Mapping[str, Any]) -> list[Job]:
    settings = config.evaluation
    # scores on another number of questions are measured again
    known = dict(row) if row.get(LIMIT) == settings.limit else {}
    return [job for job in jobs_of(settings.tasks, settings.shots) if not job.is_in(known)] if settings.tasks else []


def _text(results: Mapping[str, float | None]) -> str:
    numbers = {k: v for k, v in results.items() if k != LIMIT and not ("_shot/" in k and v is None)}
    texts = {key: "not finite" if value is None else f"{value:.4f}" for key, value in numbers.items()}
    return ", ".join(f"{key} {text}" for key, text in texts.items())
