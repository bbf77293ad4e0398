"""The numbers of a run in words: what is derived before step one, what it came to."""

from pathlib import Path
from typing import Any

from depthlm import environment
from depthlm.analysis import count_parameters, estimate_memory
from depthlm.config import Config
from depthlm.data import Corpus
from depthlm.model import Decoder
from depthlm.training.display import count_text, number_text, show_table
from depthlm.training.plan import Plan


def derived(config: Config, plan: Plan, corpus: Corpus, model: Decoder, flops_per_token: float) -> dict[str, str]:
    """Everything that follows from the configuration, by name."""
    size, training = config.size, config.training
    counts = count_parameters(model)
    train = corpus.manifest.train
    epochs = plan.total_tokens / len(corpus.train)
    memory = estimate_memory(config, counts["total"], config.deepspeed.stage, plan.world_size, plan.micro_batch_size)
    return {
        "model": f"{config.model.name}, backbone {config.backbone.name}, size {size.name}: {size.num_layers} layers of "
        f"width {size.hidden_size}, {size.num_heads} heads ({size.num_kv_heads} key/value)"
        f"{f', passed {model.loops} times' if model.loops > 1 else ''}",
        "parameters": f"{count_text(counts['total'])} ({counts['total']:,})",
        "vocabulary": f"{size.vocab_size} ({corpus.tokenizer.vocab_size} in the tokenizer)",
        "data": f"{corpus.manifest.name}: {count_text(len(corpus.train))} training tokens, "
        f"{train.bytes / train.tokens:.2f} bytes a token, unigram entropy {train.unigram_entropy:.3f} nats",
        "run": f"{plan.max_steps} steps, {count_text(plan.total_tokens)} tokens ({epochs:.2g} epochs), "
        f"warm-up {plan.warmup_steps} steps, {config.schedule.name} from {config.optimizer.lr:g}",
        "batch": f"{plan.batch_size} sequences x {plan.sequence_length} = {plan.tokens_per_step:,} tokens = "
        f"{plan.world_size} ranks x {plan.accumulation} accumulated x {plan.micro_batch_size} sequences",
        "FLOPs": f"{count_text(flops_per_token)} per token, {flops_per_token * plan.total_tokens:.3g} in all",
        "memory estimate": f"{memory.total / 2**30:.2f} GiB per rank (ZeRO {config.deepspeed.stage}"
        f"{', activation checkpointing' if training.activation_checkpointing else ''})",
        "device": f"{environment.device_name()}, {config.precision.name}"
        f"{', compiled' if training.compile else ''}, {environment.ranks().launcher}",
        "token files": str(corpus.folder),
        "run directory": str(config.output_dir),
    }


def show_summary(title: str, directory: Path, summary: dict[str, Any], rank: int) -> None:
    """What a complete run came to, as a table."""
    rows = {
        "validation loss": f"{number_text(summary['validation_loss'])} nats per token (perplexity "
        f"{number_text(summary['validation_perplexity'])}; unigram entropy {summary['unigram_entropy']:.3f})",
        "tokens": f"{count_text(summary['tokens'])} in {summary['wall_seconds']:.0f} s, "
        f"{summary['tokens_per_second']:,.0f} tokens/s",
        "peak memory": f"{summary['peak_memory_gib']:.2f} GiB",
        "loss curve": str(directory / "loss.png"),
        "weights": str(directory / "checkpoints"),
    }
    show_table(title, rows, rank)
