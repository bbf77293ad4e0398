"""Training speed against `transformers` and litgpt in a plain PyTorch loop, with the same weights, batch and AdamW.

    python benchmarks/throughput.py [--rounds 8] [--output benchmarks/results/throughput-<machine>.json]

Contenders: `depthlm` is what train.py runs (DeepSpeed, ZeRO 0); `plain` is our model in a plain loop; `zero1` is ZeRO
1; `transformers` and `litgpt` are the peers, and litgpt may be missing; `products` are only the matrix products and the
attention of a step. A contender named `... again` runs the same code a second time, so the spread of their ratio shows
the noise of the machine.
"""

import importlib.metadata
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import depthlm
from benchmarks.shared.decoders import (
    INSTALL_LITGPT,
    has_litgpt,
    litgpt_decoder,
    plain_step,
    random_tokens,
    training_of,
    transformers_decoder,
)
from benchmarks.shared.interleaved import Step, measure, ratio, spread
from benchmarks.shared.reporting import Results, arguments_of, headed, parser_of, publish, result_path, table
from depthlm.config import Config
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.machine import environment
from depthlm.model import compile_sublayers

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


def kinds_of(mode: str, pairs: list[Pair]) -> list[str]:
    """Return the contenders that these pairs need in a mode."""
    needed = {x for ours, theirs, *modes, _ in pairs for x in zip((ours, theirs), modes, strict=True)}
    return [name for name in KINDS if (name, mode) in needed]


def contender(name: str, mode: str, device: torch.device) -> Step:
    """Return a training step. It returns the loss before the update; that of `products` returns no loss."""
    precision, compiled = MODES[mode]
    settings = [f"precision={precision}", f"training.compile={str(compiled).lower()}", "tracker=none"]
    config = depthlm.compose([*SHAPE, *settings, f"deepspeed=zero{1 if name == 'zero1' else 0}"])
    if name == "products":
        return products(config, torch.bfloat16 if precision == "bf16" else torch.float32, device)
    if name in ("depthlm", "zero1"):
        return training_of(config, device).step
    batch = random_tokens(config, config.training.batch_size).to(device)
    inputs, targets = batch[:, :-1], batch[:, 1:]
    ours = depthlm.build_model(config, device)
    if name == "plain":
        model: nn.Module = ours
        if compiled:
            compile_sublayers(ours)
    else:
        model = litgpt_decoder(config, ours.state_dict()).to(device) if name == "litgpt" else transformers_decoder(ours)
        if compiled:
            model = torch.compile(model)  # type: ignore[assignment]

    def loss() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            if name == "plain":
                return model(inputs, targets).nll / targets.numel()
            logits = model(inputs) if name == "litgpt" else model(input_ids=inputs, use_cache=False).logits
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    return plain_step(model, loss, config.optimizer.lr)


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


def results_of(pairs: list[Pair], seconds: dict[str, dict[str, list[float]]]) -> Results:
    """Return the speeds and the ratios. seconds: by mode and contender."""
    tokens = 8 * 512
    compared = []
    for ours, theirs, our_mode, their_mode, wanted in pairs:
        both = {"ours": seconds[our_mode][ours], "theirs": seconds[their_mode][theirs]}
        names = {"ours": f"{ours}, {our_mode}", "theirs": f"{theirs}, {their_mode}"}
        compared.append({**names, "ratio": ratio(both, "ours", "theirs"), "wanted": wanted})
    speeds = {
        mode: {
            name: {"best": tokens / min(times), "median": tokens / statistics.median_high(times), "seconds": times}
            for name, times in turns.items()
        }
        for mode, turns in seconds.items()
    }
    noise = {mode: spread(turns, "transformers", "transformers again") for mode, turns in seconds.items()}
    return {"shape": SHAPE, "speeds": speeds, "pairs": compared, "spread": noise}


def markdown(results: Results) -> str:
    lines = []
    for pair in results["pairs"]:
        name, mode = pair["ours"].split(", ")
        speed = results["speeds"][mode][name]["median"]
        wanted = "" if pair["wanted"] is None else f"{pair['wanted']:.2f}"
        lines.append((pair["ours"], pair["theirs"], f"{speed:,.0f}", f"{pair['ratio']:.3f}", wanted))
    peers = (f"{name} {version}" for name, version in results.get("peers", {}).items())
    header = ("ours", "theirs", "tokens/s, median", "ratio, paired median", "target")
    return headed(results, table(header, lines), *peers)


def measure_mode(mode: str, kinds: list[str], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of the contenders of a mode. Exits where they compute another loss."""
    built = {name: contender(name, mode, device) for name in kinds}
    losses: dict[str, Any] = {name: step() for name, step in built.items() if name != "products"}
    for loss in losses.values():
        # ZeRO 1 rounds its weights to bf16 at the start; all others compute the same function
        if abs(loss - losses["transformers"]) > 2e-3:
            raise SystemExit(f"{mode}: not the same model: the losses are {losses}")
    return measure(built, rounds, steps=2)


def main() -> None:
    parser = parser_of(__doc__, rounds=8, threads=environment.cores())
    arguments = arguments_of(parser, markdown)
    device = start_distributed(ranks())
    if not has_litgpt():
        print(INSTALL_LITGPT)
    pairs = [pair for pair in PAIRS if has_litgpt() or "litgpt" not in pair]
    seconds = {mode: measure_mode(mode, kinds_of(mode, pairs), device, arguments.rounds) for mode in MODES}
    peers = [name for name in ("transformers", "litgpt") if any(name in pair for pair in pairs)]
    versions = {name: importlib.metadata.version(name) for name in peers}
    publish(arguments.output or result_path("throughput"), {"peers": versions, **results_of(pairs, seconds)}, markdown)


if __name__ == "__main__":
    main()
