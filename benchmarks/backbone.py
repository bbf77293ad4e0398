"""The parts of the backbone: a step with a mixture of experts against transformers', and mixers against attention.

    python benchmarks/backbone.py experts [--rounds 8] [--threads 1]
    python benchmarks/backbone.py mixers [--rounds 8] [--threads 1]

experts: the peer is transformers' Qwen3Moe with the same weights, batch and AdamW, in its implementations of experts
`eager` and `grouped_mm` (`batched_mm` copies the weights of an expert for each of its tokens, and takes some 30 times
as long). `grouped` and `looped` are our model with `torch.nn.functional.grouped_mm`, and without. Before anything is
timed, the losses of all contenders are checked to be equal.

mixers: the sublayer of each mixer with its projections, forward and backward pass, against softmax attention. D 512, 4
heads of 128 (and softmax attention also with 8 of 64), T 1,024, fp32. `delta, documents` has three documents in each
sequence. A contender named `... again` shows the noise of the machine.
"""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import depthlm
from benchmarks.shared.decoders import plain_step, random_tokens, transformers_decoder
from benchmarks.shared.interleaved import Step, measure, ratio, spread
from benchmarks.shared.reporting import Results, arguments_of, headed, parser_of, publish, result_path, table
from depthlm.config import Config
from depthlm.model.attention.context import AttentionContext, find_documents
from depthlm.model.experts import experts
from depthlm.model.layers import rope_tables

SHAPE = ["backbone=qwen3_moe", "size=micro", "size.hidden_size=256", "size.num_layers=4", "size.num_heads=4",
         "size.num_kv_heads=2", "size.head_size=64", "size.num_experts=16", "size.experts_per_token=4",
         "size.expert_size=128", "size.vocab_size=4096", "training.sequence_length=256", "training.batch_size=4",
         "tracker=none"]  # fmt: skip
OURS = ("grouped", "grouped again", "looped")
THEIRS = ("eager", "grouped_mm")
# the allowed relative difference of losses
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
BATCH, WIDTH, LENGTH = 2, 512, 1024
# mixer, heads, whether there are documents
MIXERS = {
    "attention": ("attention", 4, False),
    "attention again": ("attention", 4, False),
    "attention, 8 heads": ("attention", 8, False),
    "latent": ("latent", 4, False),
    "delta": ("delta", 4, False),
    "delta, documents": ("delta", 4, True),
}


def training_step(name: str, config: Config, precision: str, device: torch.device) -> tuple[Step, float]:
    """Return a training step with experts and its first loss."""
    tokens = random_tokens(config, config.training.batch_size).to(device)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model: Any = depthlm.build_model(config, device)
    looped: Callable[[], AbstractContextManager] = nullcontext
    if name == "looped":
        looped = partial(mock.patch.object, experts, "GROUPED", {})
    if name in THEIRS:
        model = transformers_decoder(model)
        model.set_experts_implementation(name)

    def loss() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"), looped():
            if name in OURS:
                return model(inputs, targets).nll / targets.numel()
            return F.cross_entropy(model(inputs).logits.flatten(0, 1).float(), targets.flatten())

    step = plain_step(model, loss, learning_rate=1e-3)
    return step, step()


def measure_experts(rounds: int) -> Results:
    """Return the times of all contenders by precision. Exits where their losses differ."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config, results = depthlm.compose(SHAPE), {}
    for precision, tolerance in TOLERANCE.items():
        built = {name: training_step(name, config, precision, device) for name in (*OURS, *THEIRS)}
        losses = {name: loss for name, (_, loss) in built.items()}
        if any(abs(loss - losses["looped"]) > tolerance * loss for loss in losses.values()):
            raise SystemExit(f"{precision}: the losses differ: {losses}")
        seconds = measure({name: step for name, (step, _) in built.items()}, rounds, steps=2)
        results[precision] = {
            "loss": losses["looped"],
            "times_as_fast_as": {name: ratio(seconds, "grouped", name) for name in ("looped", *THEIRS)},
            "noise": spread(seconds, "grouped", "grouped again"),
            "seconds": seconds,
        }
    return {"shape": SHAPE, "rounds": rounds, **results}


def mixer_step(mixer: str, heads: int, documents: bool) -> Step:
    """Return a forward and backward pass of a sublayer."""
    shape = [f"size.hidden_size={WIDTH}", f"size.num_heads={heads}", f"size.num_kv_heads={heads}",
             f"size.head_size={WIDTH // heads}", "size.num_layers=1"]  # fmt: skip
    position = "rope" if mixer == "attention" else "none"
    config = depthlm.compose(["size=micro", f"backbone.mixers=[{mixer}]", f"backbone.position={position}", *shape])
    sublayer = depthlm.build_model(config).layers[0].attention
    rope = rope_tables(torch.arange(LENGTH), WIDTH // heads, 1e4) if position == "rope" else None
    ends_bt = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    ends_bt[:, [333, 700]] = True
    past = AttentionContext(find_documents(ends_bt).mask if documents else None)
    x, gradient = torch.randn(2, BATCH, LENGTH, WIDTH)
    x.requires_grad_()

    def step() -> None:
        context, _ = sublayer.attend(sublayer.project(x, x, x, rope), [], past)
        sublayer.output(context).backward(gradient)

    return step


def measure_mixers(rounds: int) -> Results:
    seconds = measure({name: mixer_step(*settings) for name, settings in MIXERS.items()}, rounds, steps=1)
    return {
        "width": WIDTH, "length": LENGTH, "batch": BATCH, "rounds": rounds,
        "times_of_attention": {name: ratio(seconds, "attention", name) for name in MIXERS if name != "attention"},
        "noise": spread(seconds, "attention", "attention again"),
        "seconds": seconds,
    }  # fmt: skip


def markdown(results: Results) -> str:
    if "times_of_attention" in results:
        times = {"attention": 1.0, **results["times_of_attention"]}
        mixers = (
            (name, f"{x:.2f}", f"{1e3 * statistics.median(results['seconds'][name]):,.0f}") for name, x in times.items()
        )
        return headed(results, table(("mixer", "times the time of softmax attention", "median ms"), mixers))
    lines = (
        (precision, *(f"{results[precision]['times_as_fast_as'][name]:.2f}" for name in ("looped", *THEIRS)))
        for precision in TOLERANCE
    )
    return headed(results, table(("precision", "ours looped", *(f"`{name}`" for name in THEIRS)), lines))


def main() -> None:
    parser = parser_of(__doc__, rounds=8, threads=1)
    parser.add_argument("part", choices=("experts", "mixers"), nargs="?", default="experts")
    arguments = arguments_of(parser, markdown)
    results = (measure_experts if arguments.part == "experts" else measure_mixers)(arguments.rounds)
    publish(arguments.output or result_path(arguments.part), results, markdown)


if __name__ == "__main__":
    main()
