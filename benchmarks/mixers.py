"""The sublayer of each mixer, with its projections, against softmax attention: forward and backward pass.

    python benchmarks/mixers.py [--rounds 9] [--batch 2] [--threads 1]
                                [--output benchmarks/results/mixers-<machine>.json]

D 512, 4 heads of 128 (and softmax attention also with 8 of 64), T 1,024, fp32. `delta, documents` has three documents
in each sequence, `attention again` is the noise of the machine.
"""

import argparse
import statistics
from pathlib import Path

import torch
from interleaved import Step, measure, ratio, result_path, spread, write_json
from rich.console import Console
from rich.table import Table

import depthlm
from depthlm.model.attention.context import AttentionContext, find_documents
from depthlm.model.layers import rope_tables

WIDTH, LENGTH = 512, 1024
# mixer, heads, whether there are documents
CONTENDERS = {
    "attention": ("attention", 4, False),
    "attention again": ("attention", 4, False),
    "attention, 8 heads": ("attention", 8, False),
    "latent": ("latent", 4, False),
    "delta": ("delta", 4, False),
    "delta, documents": ("delta", 4, True),
}


def contender(mixer: str, heads: int, documents: bool, batch: int) -> Step:
    """Return a forward and backward pass of a sublayer."""
    shape = [f"size.hidden_size={WIDTH}", f"size.num_heads={heads}", f"size.num_kv_heads={heads}",
             f"size.head_size={WIDTH // heads}", "size.num_layers=1"]  # fmt: skip
    position = "rope" if mixer == "attention" else "none"
    config = depthlm.compose(["size=micro", f"backbone.mixers=[{mixer}]", f"backbone.position={position}", *shape])
    sublayer = depthlm.build_model(config).layers[0].attention
    rope = rope_tables(torch.arange(LENGTH), WIDTH // heads, 1e4) if position == "rope" else None
    ends_bt = torch.zeros(batch, LENGTH, dtype=torch.bool)
    ends_bt[:, [333, 700]] = True
    past = AttentionContext(find_documents(ends_bt).mask if documents else None)
    x, gradient = torch.randn(2, batch, LENGTH, WIDTH)
    x.requires_grad_()

    def step() -> None:
        context, _ = sublayer.attend(sublayer.project(x, x, x, rope), [], past)
        sublayer.output(context).backward(gradient)

    return step


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=result_path("mixers"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    seconds = measure({name: contender(*one, options.batch) for name, one in CONTENDERS.items()}, options.rounds, 1)
    times = {name: ratio(seconds, "attention", name) for name in CONTENDERS if name != "attention"}
    table = Table("mixer", "times the time of softmax attention", "median ms")
    for name, taken in seconds.items():
        table.add_row(name, f"{times.get(name, 1):.2f}", f"{statistics.median(taken) * 1e3:,.0f}")
    Console().print(table)
    about = {"width": WIDTH, "length": LENGTH, "batch": options.batch, "rounds": options.rounds}
    noise = spread(seconds, "attention", "attention again")
    write_json(options.output, {**about, "times_of_attention": times, "noise": noise, "seconds": seconds})


if __name__ == "__main__":
    main()
