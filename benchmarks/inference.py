"""What each mechanism adds to inference: prefill, decoding, peak memory and cache, every preset against vanilla.

    python benchmarks/inference.py [key=value ...] [--presets mhc dca] [--batch 1] [--prompt 128] [--new 64]
    python benchmarks/inference.py --table depth_attention_3b        # a paper's rows, shape and numbers

Greedy, in eager mode, from the same weights at the start; overrides change the shape, which is size=tiny in fp32 (bf16
on a GPU). Presets take turns in groups, each beside two vanilla decoders: their mean in a round is what that round
is measured against, their ratio what the machine cannot resolve. Vanilla also takes turns with transformers' own
`generate` on the same weights; whether it writes the same tokens is told.
"""

import argparse
import gc
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from interleaved import Step, against, measure, peak_memory_gib, print_peak_memory, ratio, result_path, write_json
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import depthlm
from depthlm.config import mechanisms
from depthlm.evaluation import generate
from depthlm.hugging_face.native import native_config, native_type, their_name
from depthlm.machine import environment
from depthlm.model import Decoder

AGAIN = "vanilla again"
# presets that are in memory at once
GROUP = 7
TABLES = Path(__file__).parent / "tables" / "inference"
CUDA = torch.cuda.is_available()


def build(name: str, overrides: list[str]) -> Decoder:
    """A preset with the weights of its start. name: with overrides of its own behind it."""
    preset, *own = ("vanilla" if name == AGAIN else name).split()
    config = depthlm.compose([*overrides, f"model={preset}", *own], here=False)
    model = depthlm.build_model(config, environment.device_type()).eval()
    return model.to(torch.bfloat16) if CUDA else model


def prompt_of(model: Decoder, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.size.vocab_size, (batch, length), generator=generator).to(environment.device_type())


@torch.inference_mode()
def prefill(model: Decoder, tokens_bt: Tensor, new: int) -> Any:
    """The cache after the prompt, with room for what follows."""
    cache = model.make_cache(tokens_bt.shape[1] + new)
    model.logits(model.hidden(tokens_bt, cache)[:, -1:])
    return cache


@torch.inference_mode()
def decode(model: Decoder, cache: Any, token_b1: Tensor, start: int, new: int) -> None:
    """`new` greedy tokens after a cache of `start`, one at a time."""
    cache.length = start
    for _ in range(new):
        token_b1 = model(token_b1, cache=cache)[:, -1].argmax(-1, keepdim=True)


def steps(model: Decoder, tokens_bt: Tensor, new: int) -> tuple[Step, Step, int]:
    """(prefill, decoding of `new` tokens, bytes of the cache after both)."""
    cache, start = prefill(model, tokens_bt, new), tokens_bt.shape[1]
    decode(model, cache, tokens_bt[:, :1], start, new)
    return (
        lambda: prefill(model, tokens_bt, new),
        lambda: decode(model, cache, tokens_bt[:, :1], start, new),
        cache.bytes(),
    )


def twin(model: Decoder) -> Any:
    """The same decoder as transformers has it, with its default attention."""
    kind = native_type(model)
    assert kind is not None
    settings = native_config(kind, model.size, model.backbone, 2**15)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).eval()
    theirs.load_state_dict({their_name(kind, name): tensor for name, tensor in model.state_dict().items()})
    return theirs.to(next(model.parameters()).device, next(model.parameters()).dtype)


def against_transformers(overrides: list[str], batch: int, length: int, new: int, rounds: int) -> dict[str, Any]:
    """How many times as fast as transformers' generate vanilla writes the same tokens."""
    model = build("vanilla", overrides)
    theirs = twin(model)
    tokens_bt = prompt_of(model, batch, length)
    settings: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}

    def their_turn() -> Tensor:
        return theirs.generate(tokens_bt, attention_mask=torch.ones_like(tokens_bt), **settings)

    def our_turn() -> Tensor:
        return generate(model, tokens_bt, new)

    same = torch.equal(our_turn(), their_turn())
    seconds = measure({"depthlm": our_turn, "transformers": their_turn, "depthlm again": our_turn}, rounds, steps=1)
    return {
        "same_tokens": same,
        "ratio": ratio(seconds, "depthlm", "transformers"),
        "again": ratio(seconds, "depthlm", "depthlm again"),
        "tokens_per_second": batch * new / min(seconds["depthlm"]),
        "seconds": seconds,
    }


def rows(
    built: dict[str, tuple[Step, Step, int]], rounds: int, tokens: tuple[int, int]
) -> tuple[dict[str, Any], list[float]]:
    """One line a preset, and the ratios of vanilla to itself. tokens: of a prefill and of a decoding."""
    lines: dict[str, Any] = {name: {"cache_bytes": one[2]} for name, one in built.items() if name != AGAIN}
    again: list[float] = []
    for index, (kind, count) in enumerate(zip(("prefill", "decode"), tokens, strict=True)):
        seconds = measure({name: one[index] for name, one in built.items()}, rounds, steps=1, warmup=1, settle=1)
        again += [a / b for a, b in zip(seconds[AGAIN], seconds["vanilla"], strict=True)]
        vanilla = [statistics.mean(pair) for pair in zip(seconds["vanilla"], seconds[AGAIN], strict=True)]
        for name, line in lines.items():
            line[kind] = against(vanilla if name == "vanilla" else seconds[name], vanilla, count)
    return lines, again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py, of all contenders")
    parser.add_argument("--presets", nargs="+", help="mechanisms (default: those of the table, else all)")
    parser.add_argument("--table", choices=sorted(path.stem for path in TABLES.glob("*.yaml")), help="of a paper")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens after it")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=environment.cores(), help="CPU threads (default: all cores)")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--memory-of", metavar="PRESET", help=argparse.SUPPRESS)
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the results of an earlier run as Markdown")
    given = parser.parse_intermixed_args()
    if given.markdown:
        print(markdown(json.loads(given.markdown.read_text())))
        return
    paper: Any = {} if given.table is None else OmegaConf.to_container(OmegaConf.load(TABLES / f"{given.table}.yaml"))
    if paper:
        given.batch, given.prompt, given.new = paper["batch_size"], paper["prompt"], paper["new"]
    overrides = [*paper.get("overrides", ["size=tiny"]), *given.overrides]
    presets = given.presets or [name for name in paper.get("seconds", mechanisms()) if name != "vanilla"]
    torch.set_num_threads(given.threads)
    if given.memory_of:
        model = build(given.memory_of, overrides)
        tokens_bt = prompt_of(model, given.batch, given.prompt)
        print_peak_memory(lambda: prefill(model, tokens_bt, given.new))
        return
    asked = ["--batch", str(given.batch), "--prompt", str(given.prompt), "--new", str(given.new), *overrides]
    memory = {name: peak_memory_gib(__file__, name, *asked) for name in ["vanilla", *presets]}
    results: dict[str, Any] = {
        "shape": [*overrides, f"batch={given.batch}", f"prompt={given.prompt}", f"new={given.new}"],
        "table": given.table,
        "transformers": against_transformers(overrides, given.batch, given.prompt, given.new, given.rounds),
        "again": [],
        "presets": {},
    }
    for start in range(0, len(presets), GROUP):
        models = {name: build(name, overrides) for name in ["vanilla", *presets[start : start + GROUP], AGAIN]}
        built = {
            name: steps(model, prompt_of(model, given.batch, given.prompt), given.new) for name, model in models.items()
        }
        lines, again = rows(built, given.rounds, (given.batch * given.prompt, given.batch * given.new))
        results["again"] += again
        # vanilla is in each group, and its first line stays
        results["presets"] |= {name: line for name, line in lines.items() if name not in results["presets"]}
        del models, built
        gc.collect()
    for name, line in results["presets"].items():
        whole = {k: sum(line[k]["seconds"]) / given.rounds for k in ("prefill", "decode")}
        line |= {"peak_memory_gib": memory[name], "seconds": sum(whole.values())}
        line |= {"paper_seconds": paper.get("seconds", {}).get(name), "paper_gb": paper.get("prefill_gb", {}).get(name)}
    Console(highlight=False).print(table(results))
    same = {line["cache_bytes"] for line in results["presets"].values()}
    print(f"the cache is vanilla's, to the byte: {len(same) == 1} ({same})")
    peer = results["transformers"]
    kind = "the same" if peer["same_tokens"] else "OTHER"
    print(f"transformers' generate takes {peer['ratio']:.2f} times as long, and writes {kind} tokens")
    output = given.output or result_path(f"inference-{given.table}" if given.table else "inference")
    write_json(output, results)
    print(f"written to {output}")


COLUMNS = ("preset", "prefill us/token", "added", "decode us/token", "added", "us added", "GiB", "cache bytes", "paper")


def cells(name: str, line: dict[str, Any], vanilla: dict[str, Any]) -> list[str]:
    """One preset's line. paper: what it adds to prefill and decoding together."""
    paper = line["paper_seconds"] and line["paper_seconds"] / vanilla["paper_seconds"] - 1
    return [
        name,
        f"{line['prefill']['microseconds_per_token']:,.1f}",
        f"{line['prefill']['overhead']:+.1%}",
        f"{line['decode']['microseconds_per_token']:,.0f}",
        f"{line['decode']['overhead']:+.1%}",
        f"{line['decode']['microseconds_added']:+,.0f}",
        f"{line['peak_memory_gib']:.2f}",
        f"{line['cache_bytes']:,}",
        "" if paper is None else f"{paper:+.2%}",
    ]


def lines_of(results: dict[str, Any]) -> list[list[str]]:
    presets = results["presets"]
    return [cells(name, line, presets["vanilla"]) for name, line in presets.items()]


def table(results: dict[str, Any]) -> Table:
    spread = max(abs(value - 1) for value in results["again"])
    median = statistics.median(results["again"])
    shown = Table(*COLUMNS, caption=f"vanilla again: median {median:.3f}, single rounds off by up to {spread:.1%}")
    for line in lines_of(results):
        shown.add_row(*line)
    return shown


def markdown(results: dict[str, Any]) -> str:
    machine = results["machine"]
    head = f"{machine['device']}, {machine['threads']} threads, torch {machine['versions']['torch']}:"
    lines = [head, "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(line)} |" for line in lines_of(results))])


if __name__ == "__main__":
    main()
