"""What calls cost the host: microseconds of every operator in Triton and of a decoder's eager step, without a GPU.

    python benchmarks/host.py [--presets mhc dca] [--rounds 50]

Tensors are tiny and on the CPU. A launch ends where the driver would begin: Triton binds and checks the arguments, and
then nothing runs. So what is timed is Python, PyTorch's dispatcher and autograd, and that part of Triton. On a GPU, the
driver's calls and other threads come on top. Times are those of the fastest round.
"""

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

import depthlm
from benchmarks.rehearsal import PRESETS
from benchmarks.shared import reporting
from benchmarks.shared.operators import CASES, Make, Shape
from depthlm.config import compose_anywhere
from depthlm.model import Decoder
from depthlm.ops import backend

# the numbers of sources, streams and entries are those of 48 layers
SHAPE = Shape(batch=1, length=4, d=64, layers=48, h=4, k=2, e=16, entries=48)
DECODER = ("hidden_size=64", "intermediate_size=64", "num_heads=4", "num_kv_heads=2", "head_size=16")
# seconds of a turn
TURN = 0.02
Seconds = dict[str, float]
Phases = dict[str, Callable[[Any], Any]]


def skip_launches() -> None:
    """From now on, let Triton's operators accept CPU tensors, and let a launch do everything but run."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    answers = {"current_target": GPUTarget("cuda", 90, 32), "current_device": 0, "current_stream": 0}
    driver.set_active(SimpleNamespace(**{f"get_{name}": lambda *_, x=x: x for name, x in answers.items()}))
    compiled = SimpleNamespace(
        function=None, packed_metadata=None, launch_metadata=lambda *_: None, run=lambda *_: None
    )

    def compile_nothing(self: JITFunction, key: Any, *_: Any) -> Any:
        return self.device_caches[0][0].setdefault(key, compiled)

    JITFunction._do_compile = compile_nothing
    backend.missing = lambda device: None


def measure(jobs: dict[str, Phases], rounds: int) -> dict[str, Seconds]:
    """Return the seconds of the phases of each job, in its fastest round. Each phase gets the result of the one before.

    All jobs take a turn in each round, as other processes slow the machine down at times.
    """
    shortest: dict[str, Seconds] = {name: {} for name in jobs}
    for number in track(range(rounds + 1), "timing", transient=True):
        for name, phases in jobs.items():
            seconds, calls, begin = dict.fromkeys(phases, 0.0), 0, time.perf_counter()
            while not calls or time.perf_counter() - begin < TURN:
                calls, result = calls + 1, None
                for phase, call in phases.items():
                    started = time.perf_counter()
                    result = call(result)
                    seconds[phase] += time.perf_counter() - started
            # the first round compiles and fills caches
            if number:
                shortest[name] = {phase: min(x / calls, shortest[name].get(phase, x)) for phase, x in seconds.items()}
    return shortest


def operator_phases(name: str) -> Phases:
    """Return a forward and a backward pass."""
    case = CASES[name](SHAPE, Make(torch.Generator().manual_seed(0), torch.float32))
    # MoDA's entries get their gradients in other layers
    inputs = case.inputs[:3] if case.flash else case.inputs
    grads = [torch.zeros_like(y) for y in case.run()]
    return {"forward": lambda _: case.run(), "backward": lambda y: torch.autograd.grad(y, inputs, grads)}


def decoder_phases(preset: str, layers: int) -> Phases:
    """Return a forward and a backward pass, and the decoding of a token."""
    size = [f"size.{setting}" for setting in (*DECODER, f"num_layers={layers}")]
    config = compose_anywhere([f"model={preset}", "kernels=triton", "data.tokenizer=bytes", *size])
    model, tokens_bt = depthlm.build_model(config, "cpu"), torch.zeros(1, 9, dtype=torch.long)
    return {
        "forward": lambda _: model(tokens_bt[:, :-1], tokens_bt[:, 1:]).nll,
        "backward": lambda loss: loss.backward(),
        "token": decoding(model, tokens_bt),
    }


def decoding(model: Decoder, tokens_bt: Tensor) -> Callable[[Any], Tensor]:
    """Return a function that decodes the token after the first ones."""
    cache, prompt = model.make_cache(tokens_bt.shape[1] + 1), tokens_bt.shape[1]
    with torch.inference_mode():
        model(tokens_bt, cache=cache)

    @torch.inference_mode()
    def decode(_: Any) -> Tensor:
        cache.length = prompt
        return model(tokens_bt[:, :1], cache=cache)

    return decode


def markdown(results: reporting.Results) -> str:
    tables = []
    for kind, columns, unit, digits in (
        ("operators", ("forward", "backward"), 1e6, 0),
        ("decoders", ("forward", "backward", "token"), 1e3, 1),
    ):
        header = [kind[:-1], *(f"{name} {'us' if unit == 1e6 else 'ms'}" for name in columns)]
        rows = ([name, *(f"{unit * x[c]:,.{digits}f}" for c in columns)] for name, x in results[kind].items())
        tables.append(reporting.table(header, rows))
    return reporting.headed(results, "\n\n".join(tables), f"{results['layers']} layers")


def main() -> int:
    parser = reporting.parser_of(__doc__, rounds=50, threads=1)
    parser.add_argument("--operators", nargs="*", default=list(CASES), choices=CASES, metavar="NAME")
    parser.add_argument("--presets", nargs="*", default=list(PRESETS))
    parser.add_argument("--layers", type=int, default=SHAPE.layers, help="of the decoders (default: %(default)s)")
    arguments = reporting.arguments_of(parser, markdown)
    skip_launches()
    with backend.using("triton"):
        operators = measure({name: operator_phases(name) for name in arguments.operators}, arguments.rounds)
    decoders = measure({name: decoder_phases(name, arguments.layers) for name in arguments.presets}, arguments.rounds)
    results = {"layers": arguments.layers, "operators": operators, "decoders": decoders}
    reporting.publish(arguments.output or reporting.result_path("host"), results, markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
