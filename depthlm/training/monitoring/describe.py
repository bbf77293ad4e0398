"""What a run prints and records about itself: the derived values before its first step, and its results."""

import json
import logging
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthlm.accounting.cost import count_parameters, long_run_remark
from depthlm.accounting.memory import Memory
from depthlm.config import Config
from depthlm.config.classes import reads_across_layers, targets
from depthlm.config.protocol import MASKS
from depthlm.counts import count_text, duration_text, format_count, gib_text
from depthlm.data import Batches, Corpus
from depthlm.distributed.launchers import ranks
from depthlm.files import replace_text
from depthlm.locations import command
from depthlm.machine import environment
from depthlm.model import Decoder
from depthlm.model.parameters import fp32_parameters
from depthlm.run_directory import RunDirectory
from depthlm.runs.loss_curve import plot_loss
from depthlm.runs.manifest import Progress
from depthlm.runs.progress import mean_mfu
from depthlm.runs.records import ValidationLosses, loss_key, perplexity, text_key
from depthlm.training.monitoring.display import console, number_text, show_table
from depthlm.training.plan import Plan

log = logging.getLogger("depthlm")
# the parameters from which a model needs more text than the standard library has
LARGE = 100_000_000


@dataclass(frozen=True)
class Cost:
    """The number of parameters, the FLOPs of a training step per token, and the bytes of the KV cache per token."""

    parameters: int
    flops_per_token: float
    cache_bytes_per_token: int


def derive_values(
    config: Config,
    plan: Plan,
    corpus: Corpus,
    batches: Batches,
    model: Decoder,
    flops_per_token: float,
    memory: Memory | None,
) -> dict[str, str]:
    """Return the values derived from the configuration, by name."""
    size, chunks = config.size, config.training.pipeline.chunks
    counts = count_parameters(model)
    activated = f", {count_text(counts['activated'])} activated by a token" if "activated" in counts else ""
    epochs = f" ({plan.total_tokens / corpus.tokens:.2g} epochs)" if len(corpus.train) == 1 else ""
    entropy = "" if corpus.unigram_entropy is None else f", unigram entropy {corpus.unigram_entropy:.3f} nats"
    return {
        "model": f"{config.model.name}, backbone {config.backbone.name}, size {size.name}: {size.num_layers} layers of "
        f"width {size.hidden_size}, {size.num_heads} heads ({size.num_kv_heads} key/value)"
        f"{f', passed {model.loops} times' if model.loops > 1 else ''}",
        **({"dropout": f"{config.backbone.dropout:g}"} if config.backbone.dropout else {}),
        **mixers(config),
        **({"protocol": protocol} if (protocol := protocol_remark(config, counts["total"])) else {}),
        "parameters": f"{count_text(counts['total'])} ({counts['total']:,}){activated}",
        "vocabulary": f"{size.vocab_size} ({corpus.tokenizer.vocab_size} in the tokenizer)",
        "data": f"{corpus.name}: {count_text(corpus.tokens)} training tokens, "
        f"{corpus.bytes_per_token:.2f} bytes per token{entropy}"
        f"{f', {MASKS[config.data.document_mask]}' if config.data.document_mask else ''}",
        **({"mixture": mixture(plan, batches)} if len(corpus.train) > 1 else {}),
        "validation": ", ".join(f"{name} ({count_text(len(tokens))})" for name, tokens in corpus.validation.items()),
        "run": f"{plan.max_steps} steps, {count_text(plan.total_tokens)} tokens{epochs}, "
        f"warm-up {format_count(plan.warmup_steps, 'step')}, {config.schedule.name} from {config.optimizer.lr:g}",
        **({"remark": remark} if (remark := long_run_remark(config)) else {}),
        "batch": f"{plan.batch_size} sequences x {plan.sequence_length} = {plan.tokens_per_step:,} tokens = "
        f"{format_count(plan.replicas, 'rank' if plan.stages == 1 else 'pipeline')} x {plan.accumulation} accumulated "
        f"x {plan.micro_batch_size} sequences",
        **(
            {"pipeline": f"{plan.stages} stages x {format_count(chunks, 'chunk')} of layers"} if plan.stages > 1 else {}
        ),
        "FLOPs": f"{count_text(flops_per_token)} per token, {flops_per_token * plan.total_tokens:.3g} in all",
        "memory estimate": memory_text(config, memory),
        "dtypes": dtypes(config, model),
        "device": f"{environment.device_name(environment.device_type(config.device))}, {config.precision.name}"
        f"{', compiled' if model.is_compiled else ''}, {ranks().launcher}",
        "token files": ", ".join(map(str, corpus.folders.values())),
        "run directory": str(config.output_dir),
    }


def protocol_remark(config: Config, parameters: int) -> str:
    """Return the overrides of the paper that has this size if the run has others, and those of a larger corpus.

    An experiment has a protocol of its own, so its runs have no such remark.
    """
    if config.experiment.name:
        return ""
    chosen = {"size": config.size.name, "backbone": config.backbone.name, "data": config.data.name}
    paper = dict(config.size.paper)
    source = paper.pop("source", "")
    differs = any(chosen[group] != name for group, name in paper.items())
    groups = " ".join(f"{group}={name}" for group, name in paper.items())
    remarks = [f"differs from {source}: {groups}"] if differs else []
    if chosen["data"] == "stdlib" and parameters > LARGE and "data" not in paper:
        remarks.append(f"data=stdlib is small for {count_text(parameters)} parameters; data=fineweb_edu is larger")
    return "; ".join(remarks)


def summary_of(
    progress: Progress,
    losses: ValidationLosses,
    texts: Mapping[str, str],
    last: Mapping[str, Any],
    cost: Cost,
    *,
    unigram_entropy: float | None,
    rows: Iterable[Mapping[str, Any]],
    peak_memory_gib: float,
) -> dict[str, Any]:
    """Return the content of summary.json.

    losses: of the last validation. texts: what it was measured on, by set. last: the last row of metrics.jsonl.
    unigram_entropy: of the corpus, in nats per token. rows: of metrics.jsonl.
    """
    return {
        "parameters": cost.parameters,
        "steps": progress.step,
        "tokens": progress.tokens,
        "training_loss": last.get("loss"),
        "validation_loss": losses.mean,
        "validation_perplexity": perplexity(losses.mean),
        **losses.row(),
        **{text_key(name): text for name, text in texts.items()},
        "unigram_entropy": unigram_entropy,
        "mfu": mean_mfu(rows),
        "peak_memory_gib": peak_memory_gib,
        "forward_flops_per_token": cost.flops_per_token / 3,
        "training_flops": cost.flops_per_token * progress.tokens,
        "cache_bytes_per_token": cost.cache_bytes_per_token,
        "tokens_per_second": progress.tokens_per_second,
        "wall_seconds": progress.wall_seconds,
        "skipped": progress.skipped,
        "spikes": progress.spikes,
    }


def write_results(directory: Path, summary: dict[str, Any]) -> None:
    """Write the summary of a complete run and draw its losses, and print the summary; on rank 0.

    Raises OSError if the summary cannot be written; without a picture of the losses, the run is complete as well.
    """
    replace_text(RunDirectory(directory).summary, json.dumps(summary, indent=1) + "\n")
    try:
        plot_loss(directory, summary["unigram_entropy"])
    except OSError as error:
        log.warning("the loss curve cannot be drawn (%s)", error)
    show_summary("This run is complete", directory, summary, rank=0)


def show_summary(title: str, directory: Path, summary: dict[str, Any], rank: int) -> None:
    """Print the summary of a complete run as a table."""
    unigram = summary["unigram_entropy"]
    entropy = "" if unigram is None else f"; unigram entropy {unigram:.3f}"
    losses = ValidationLosses.of_row(summary).by_set
    sets = {}
    if len(losses) > 1:
        sets = {
            loss_key(name): f"{number_text(loss)} (perplexity {number_text(perplexity(loss))})"
            for name, loss in losses.items()
        }
    rows = {
        "validation loss": f"{number_text(summary['validation_loss'])} nats per token (perplexity "
        f"{number_text(summary['validation_perplexity'])}{entropy})",
        **sets,
        "tokens": f"{count_text(summary['tokens'])} in {duration_text(summary['wall_seconds'])}, "
        f"{summary['tokens_per_second']:,.0f} tokens/s",
        "peak memory": f"{summary['peak_memory_gib']:.2f} GiB",
        "loss curve": str(RunDirectory(directory).loss_curve),
        "weights": str(RunDirectory(directory).checkpoints),
    }
    show_table(title, rows, rank)


def show_next_commands(config: Config) -> None:
    """Print commands that use a complete run, without a table, so that a long command can be copied."""
    directory = RunDirectory.of(config.output_dir).path
    modules = dict.fromkeys(target.rpartition(".")[0] for target in targets(config.model).values())
    own = [name for name in modules if not f"{name}.".startswith("depthlm.")]
    trust = f" trust={','.join(own)}" if own else ""
    run = shlex.quote(str(directory))
    commands = (
        f'{command("-m depthlm generate", "generate")} run={run}{trust} prompt="The"',
        f"{command('-m depthlm inspect', 'inspect')} run={run}{trust}",
        f"{command('-m depthlm report', 'report')} {run} <another run>",
    )
    console.print("\n  ".join(["Next:", *commands]), soft_wrap=True, markup=False)


def mixers(config: Config) -> dict[str, str]:
    """Describe the mixers of the layers, and to how many of them the mechanism's attention applies, if they differ."""
    names = config.backbone.mixers_of(config.size.num_layers)
    if set(names) == {"attention"}:
        return {}
    counts = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
    kept = len(names) - names.count("delta")
    where = (
        f"; the attention of {config.model.name} is in the {kept} with keys and values"
        if reads_across_layers(config.model)
        else ""
    )
    return {"mixers": f"{counts} layers{where}"}


def memory_text(config: Config, memory: Memory | None) -> str:
    """Describe the memory estimate of a rank and the settings it holds for."""
    if config.training.pipeline.stages > 1:
        return "none: it is that of a rank with all layers"
    if memory is None:
        return "none: the decoder or the optimizer cannot be traced"
    recompute = config.training.activation_checkpointing
    kinds = {False: "", True: ", activation checkpointing", "selective": ", selective activation checkpointing"}
    checkpointing = kinds.get(recompute, f", activation checkpointing of every {recompute} layers")
    experts = config.deepspeed.experts
    spread = f", experts spread over {experts} ranks" if experts > 1 else ""
    offloaded = f", and {gib_text(memory.offloaded)} of CPU memory" if memory.offloaded else ""
    return (
        f"{gib_text(memory.total)} per rank (ZeRO {config.deepspeed.stage}{spread}{checkpointing}), "
        f"{gib_text(memory.activations)} of it activations{offloaded}"
    )


def dtypes(config: Config, model: Decoder) -> str:
    """Describe the dtypes of computation, weights, gradient accumulation and communication."""
    name, sharding = config.precision.name, config.deepspeed
    weights = "fp32" if sharding.stage == 0 else name
    reduced = weights if sharding.communication_data_type == "auto" else sharding.communication_data_type
    if weights == "fp32":
        residual = "fp32" if config.precision.fp32_residual else name
        autocast = f"fp32 weights, {name} matrix products (autocast), residual stream in {residual}"
        computed = "fp32" if name == "fp32" else autocast
        return f"{computed}; gradients accumulated in fp32, reduced in {reduced}"
    scale = f"; loss scale from {2**config.precision.initial_scale_power}, dynamic" if name == "fp16" else ""
    in_fp32 = sorted({name.rpartition(".")[2] for name in fp32_parameters(model)})
    exceptions = f" (fp32: {', '.join(in_fp32)})" if in_fp32 else ""
    return f"{name} weights{exceptions}, fp32 master copy; gradients accumulated in fp32, reduced in {reduced}{scale}"


def mixture(plan: Plan, batches: Batches) -> str:
    """Describe each source's share of the training tokens and its epochs in the whole run."""
    seen = batches.count_seen(plan.max_steps)
    return ", ".join(f"{name} {100 * share:.3g}% ({epochs:.2g} epochs)" for name, (share, epochs) in seen.items())
