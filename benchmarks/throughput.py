"""Training speed against `transformers` and litgpt in a plain PyTorch loop, with the same weights, batch and AdamW.

    python benchmarks/throughput.py [--rounds 8] [--steps 2] [--output benchmarks/results/throughput-<machine>.json]

Contenders: `depthlm` is what train.py runs (DeepSpeed, ZeRO 0); `plain` is our model in a plain loop; `zero1` is ZeRO
1; `transformers` and `litgpt` are the peers, and litgpt may be missing; `products` are only the matrix products and the
attention of a step. A contender named `... again` runs the same code a second time, so the spread of their ratio shows
the noise of the machine.
"""

import argparse
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from interleaved import Step, measure, peak_memory_gib, print_peak_memory, ratio, result_path, spread, write_json
from others.decoders import INSTALL_LITGPT, has_litgpt, litgpt_decoder, transformers_decoder
from rich.console import Console
from rich.table import Table
from torch import nn

import depthlm
from depthlm.config import Config
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.machine import environment
from depthlm.model import compile_sublayers
from depthlm.training.engine import build_engine
from depthlm.training.plan import make_plan
from depthlm.training.step import train_step

SHAPE = ["size.hidden_size=256", "size.intermediate_size=704", "size.num_layers=8", "size.num_heads=4",
         "size.num_kv_heads=2", "size.head_size=64", "size.vocab_size=4096", "training.sequence_length=512",
         "training.batch_size=8"]  # fmt: skip
# mode of a run: (precision, whether torch.compile is on)
MODES = {"fp32": ("fp32", False), "bf16": ("bf16", False), "bf16 compiled": ("bf16", True)}
KINDS = ("transformers", "transformers again", "litgpt", "depthlm", "plain", "zero1", "products")
Pair = tuple[str, str, str, str, float | None]
# (ours, theirs, mode of ours, mode of theirs, target for the ratio); the contenders of a mode are those of its pairs
PAIRS: list[Pair] = [
    ("depthlm", "transformers", "fp32", "fp32", 0.97),
    ("depthlm", "transformers", "bf16", "bf16", 1.1),
    ("depthlm", "transformers", "bf16 compiled", "bf16", 1.3),
    ("depthlm", "transformers", "bf16 compiled", "bf16 compiled", None),
    ("plain", "litgpt", "fp32", "fp32", 1.05),
    ("plain", "litgpt", "bf16", "bf16", 1.2),
    ("plain", "litgpt", "bf16 compiled", "bf16 compiled", 1.1),
    # a step may take 1.15 and 1.05 times as long as its products
    ("plain", "products", "bf16", "bf16", 0.87),
    ("plain", "products", "bf16 compiled", "bf16 compiled", 0.95),
    ("depthlm", "plain", "fp32", "fp32", 0.95),
    ("depthlm", "plain", "bf16", "bf16", 0.95),
    ("zero1", "plain", "fp32", "fp32", None),
    ("zero1", "plain", "bf16", "bf16", None),
    ("transformers again", "transformers", "fp32", "fp32", None),
    ("transformers again", "transformers", "bf16", "bf16", None),
    ("transformers again", "transformers", "bf16 compiled", "bf16 compiled", None),
]


def measurable_pairs() -> list[Pair]:
    """Return PAIRS without those of a peer that is not installed."""
    return [pair for pair in PAIRS if has_litgpt() or "litgpt" not in pair]


def kinds_of(mode: str, pairs: list[Pair]) -> list[str]:
    """Return the contenders that these pairs need in a mode."""
    needed = {x for ours, theirs, *modes, _ in pairs for x in zip((ours, theirs), modes, strict=True)}
    return [kind for kind in KINDS if (kind, mode) in needed]


def configuration(kind: str, mode: str) -> Config:
    """Return the configuration of a contender; only the ZeRO stage depends on `kind`."""
    stage = 1 if kind == "zero1" else 0
    return depthlm.compose([*SHAPE, f"precision={MODES[mode][0]}", f"deepspeed=zero{stage}", "tracker=none"])


def make_batch(config: Config) -> torch.Tensor:
    """Return tokens of shape [1, batch, T + 1]."""
    shape = (1, config.training.batch_size, config.training.sequence_length + 1)
    return torch.randint(config.size.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def contender(kind: str, mode: str, device: torch.device) -> tuple[Step, Callable[[], float] | None]:
    """Return (one training step, a function that returns the loss on the batch before any step, if it has one)."""
    config = configuration(kind, mode)
    if kind == "products":
        return products(config, torch.bfloat16 if MODES[mode][0] == "bf16" else torch.float32, device), None
    batch = make_batch(config).to(device)
    compiled = MODES[mode][1]
    if kind in ("depthlm", "zero1"):
        plan = make_plan(config, ranks())
        model = depthlm.build_model(config, device)
        if compiled:
            compile_sublayers(model)
        engine = build_engine(config, plan, model)
        inputs, targets = batch[0, :, :-1], batch[0, :, 1:]
        first = float(engine(inputs, targets).nll.detach()) / targets.numel()
        return (lambda: train_step(engine, batch, plan, 0.0).item()), lambda: first
    ours = depthlm.build_model(config, device)
    tokens = config.training.batch_size * config.training.sequence_length
    if kind == "plain":
        model: nn.Module = ours
        if compiled:
            compile_sublayers(ours)
    else:
        model = litgpt_decoder(config, ours.state_dict()).to(device) if kind == "litgpt" else transformers_decoder(ours)
        if compiled:
            model = torch.compile(model)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, betas=(0.9, 0.95), fused=True)

    def forward() -> torch.Tensor:
        inputs, targets = batch[0, :, :-1], batch[0, :, 1:]
        with torch.autocast(device.type, torch.bfloat16, enabled=MODES[mode][0] == "bf16"):
            if kind == "plain":
                return model(inputs, targets).nll / tokens
            logits = model(inputs) if kind == "litgpt" else model(input_ids=inputs, use_cache=False).logits
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def step() -> None:
        loss = forward()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step, lambda: forward().item()


def products(config: Config, dtype: torch.dtype, device: torch.device) -> Step:
    """Return the forward and backward pass of only the matrix products and the attention of a step.

    It returns the gradients of all inputs and weights, which are random and already in the dtype. Products share their
    input where those of the decoder do, so the gradients of the input are summed. Nothing is compiled in any mode,
    since these operators are calls of libraries.
    Shapes: b batch, t tokens, d hidden size, f width of the MLP, h query heads, k key/value heads, e head size.
    """
    size, b, t = config.size, config.training.batch_size, config.training.sequence_length
    d, f, h, k, e = size.hidden_size, size.intermediate_size, size.num_heads, size.num_kv_heads, size.head_size

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)

    # (width of an input, widths of the outputs of the products that share it)
    layer = [(d, (h * e, k * e, k * e)), (h * e, (d,)), (d, (f, f)), (f, (d,))]
    widths = [*layer * size.num_layers, (d, (size.vocab_size,))]
    linears = [(make(b, t, n), [make(m, n) for m in outputs]) for n, outputs in widths]
    attentions = [[make(b, t, heads, e) for heads in (h, k, k)] for _ in range(size.num_layers)]
    leaves = [x for shared, weights in linears for x in (shared, *weights)] + [x for qkv in attentions for x in qkv]

    def forward() -> list[torch.Tensor]:
        outputs = [F.linear(shared, weight) for shared, weights in linears for weight in weights]
        for qkv in attentions:
            q_bhte, k_bkte, v_bkte = (x.transpose(1, 2) for x in qkv)
            outputs.append(F.scaled_dot_product_attention(q_bhte, k_bkte, v_bkte, is_causal=True, enable_gqa=h != k))
        return outputs

    gradients = [torch.randn_like(y) for y in forward()]
    return lambda: torch.autograd.grad(forward(), leaves, gradients)


def markdown(path: Path) -> str:
    """Return the results of an earlier run as a Markdown table."""
    results = json.loads(path.read_text())
    machine = results["machine"]
    versions = {"torch": machine["versions"]["torch"], **results.get("peers", {})}
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [f"{machine['device']}, {machine['threads']} threads, {software}:", ""]
    lines += ["| ours | theirs | tokens/s, median | ratio, paired median | target |", "|---|---|---|---|---|"]
    for pair in results["pairs"]:
        kind, mode = pair["ours"].split(", ")
        speed = results["speeds"][mode][kind]["median"]
        wanted = "" if pair["wanted"] is None else f"{pair['wanted']:.2f}"
        lines.append(f"| {pair['ours']} | {pair['theirs']} | {speed:,.0f} | {pair['ratio']:.3f} | {wanted} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="steps of one turn")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--memory-of", nargs=2, metavar=("KIND", "MODE"), help=argparse.SUPPRESS)
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the results of an earlier run as Markdown")
    arguments = parser.parse_args()
    if arguments.markdown:
        print(markdown(arguments.markdown))
        return
    torch.set_num_threads(environment.cores())
    device = start_distributed(ranks())
    if arguments.memory_of:
        print_peak_memory(contender(*arguments.memory_of, device)[0])
        return
    console = Console(highlight=False)
    if not has_litgpt():
        console.print(INSTALL_LITGPT)
    pairs = measurable_pairs()
    kinds = {mode: kinds_of(mode, pairs) for mode in MODES}
    seconds: dict[str, dict[str, list[float]]] = {}
    without_memory = ("transformers again", "products")
    memory = {
        mode: {kind: peak_memory_gib(__file__, kind, mode) for kind in kinds[mode] if kind not in without_memory}
        for mode in MODES
    }
    for mode in MODES:
        built = {kind: contender(kind, mode, device) for kind in kinds[mode]}
        losses = {kind: loss() for kind, (_, loss) in built.items() if loss}
        for kind, loss in losses.items():
            # ZeRO 1 rounds its weights to bf16 at the start; all others compute the same function
            if abs(loss - losses["transformers"]) > 2e-3:
                raise SystemExit(
                    f"{mode}: {kind} has loss {loss}, transformers {losses['transformers']}: not the same model"
                )
        seconds[mode] = measure({kind: step for kind, (step, _) in built.items()}, arguments.rounds, arguments.steps)
    peers = [name for name in ("transformers", "litgpt") if any(name in pair for pair in pairs)]
    versions = {name: importlib.metadata.version(name) for name in peers}
    results = {"peers": versions, **report(console, pairs, seconds, memory)}
    output = arguments.output or result_path("throughput")
    write_json(output, results)
    console.print(f"written to {output}")


def report(
    console: Console,
    compared: list[Pair],
    seconds: dict[str, dict[str, list[float]]],
    memory: dict[str, dict[str, float]],
) -> dict[str, Any]:
    """Print the tables, and return them as data."""
    tokens = 8 * 512
    table = Table("mode", "contender", "tokens/s (best)", "tokens/s (median)", "peak memory (GiB)")
    speeds: dict[str, Any] = {}
    for mode, turns in seconds.items():
        speeds[mode] = {}
        for kind, times in turns.items():
            median = sorted(times)[len(times) // 2]
            speeds[mode][kind] = {"best": tokens / min(times), "median": tokens / median, "seconds": times}
            gib = memory[mode].get(kind)
            table.add_row(
                mode, kind, f"{tokens / min(times):,.0f}", f"{tokens / median:,.0f}", f"{gib:.2f}" if gib else ""
            )
    console.print(table)
    pairs = []
    table = Table("ours", "theirs", "ratio (paired median)", "target")
    for ours, theirs, our_mode, their_mode, wanted in compared:
        both = {"ours": seconds[our_mode][ours], "theirs": seconds[their_mode][theirs]}
        value = ratio(both, "ours", "theirs")
        pairs.append(
            {"ours": f"{ours}, {our_mode}", "theirs": f"{theirs}, {their_mode}", "ratio": value, "wanted": wanted}
        )
        mark = "" if wanted is None else f"{wanted} {'reached' if value >= wanted else 'MISSED'}"
        table.add_row(f"{ours}, {our_mode}", f"{theirs}, {their_mode}", f"{value:.3f}", mark)
    console.print(table)
    spreads = {mode: spread(turns, "transformers", "transformers again") for mode, turns in seconds.items()}
    console.print(
        "largest A/A deviation of a single round: "
        + ", ".join(f"{mode} {value:.1%}" for mode, value in spreads.items())
    )
    return {"shape": SHAPE, "speeds": speeds, "pairs": pairs, "spread": spreads, "peak_memory_gib": memory}


if __name__ == "__main__":
    main()
