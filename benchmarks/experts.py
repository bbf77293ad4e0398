"""A training step with a mixture of experts against transformers', and grouped products against a loop over experts.

    python benchmarks/experts.py [--rounds 8] [--steps 2] [--threads 1]
                                 [--output benchmarks/results/experts-<machine>.json]

The peer is transformers' Qwen3Moe with the same weights, batch and AdamW, in its implementations of experts `eager` and
`grouped_mm`. A third, `batched_mm`, copies the weights of an expert for each of its tokens, and takes some 30 times as
long here. `grouped` and `looped` are our model with `torch.nn.functional.grouped_mm`, and without. Before
anything is timed, the losses of all contenders are checked to be equal.
"""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from interleaved import Step, measure, ratio, result_path, spread, write_json
from others.decoders import transformers_decoder
from rich.console import Console
from rich.table import Table

import depthlm
from depthlm.config import Config
from depthlm.model.experts import experts

SHAPE = ["backbone=qwen3_moe", "size=micro", "size.hidden_size=256", "size.num_layers=4", "size.num_heads=4",
         "size.num_kv_heads=2", "size.head_size=64", "size.num_experts=16", "size.experts_per_token=4",
         "size.expert_size=128", "size.vocab_size=4096", "training.sequence_length=256", "training.batch_size=4",
         "tracker=none"]  # fmt: skip
OURS = ("grouped", "grouped again", "looped")
THEIRS = ("eager", "grouped_mm")
PRECISIONS = ("fp32", "bf16")
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}


def contender(kind: str, config: Config, precision: str, device: torch.device) -> tuple[Step, float]:
    """Return a training step and its first loss."""
    shape = (config.training.batch_size, config.training.sequence_length + 1)
    tokens = torch.randint(config.size.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model: Any = depthlm.build_model(config, device)
    looped: Callable[[], AbstractContextManager] = nullcontext
    if kind == "looped":
        looped = partial(mock.patch.object, experts, "GROUPED", {})
    if kind in THEIRS:
        model = transformers_decoder(model)
        model.set_experts_implementation(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)

    def loss() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"), looped():
            if kind in OURS:
                return model(inputs, targets).nll / targets.numel()
            return F.cross_entropy(model(inputs).logits.flatten(0, 1).float(), targets.flatten())

    def step() -> None:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    first = float(loss().detach())
    step()
    return step, first


def compare(config: Config, precision: str, rounds: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Return the times of all contenders."""
    made: dict[str, Step] = {}
    losses = {}
    for kind in (*OURS, *THEIRS):
        made[kind], losses[kind] = contender(kind, config, precision, device)
    if any(abs(loss - losses["looped"]) > TOLERANCE[precision] * loss for loss in losses.values()):
        raise SystemExit(f"{precision}: the losses differ: {losses}")
    seconds = measure(made, rounds, steps)
    peers = {kind: ratio(seconds, "grouped", kind) for kind in made if kind not in ("grouped", "grouped again")}
    return {
        "loss": losses["looped"],
        "times_as_fast_as": peers,
        "noise": spread(seconds, "grouped", "grouped again"),
        "seconds": seconds,
    }


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=result_path("experts"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = depthlm.compose(SHAPE)
    results = {name: compare(config, name, options.rounds, options.steps, device) for name in PRECISIONS}
    table = Table("precision", "grouped against", "times as fast", "median ms, grouped", "theirs")
    for precision, result in results.items():
        for kind, fast in result["times_as_fast_as"].items():
            ours, theirs = (sorted(result["seconds"][name])[options.rounds // 2] * 1e3 for name in ("grouped", kind))
            table.add_row(precision, kind, f"{fast:.2f}", f"{ours:,.0f}", f"{theirs:,.0f}")
    Console().print(table)
    write_json(options.output, {"shape": SHAPE, "rounds": options.rounds, "steps": options.steps, **results})


if __name__ == "__main__":
    main()
