"""What a training step of a preset requires of an H100, computed on a machine without a GPU.

    python benchmarks/rehearsal.py [--size 1.5b,3b] [--presets moda,dca] [--compile] [--code] [overrides]

Runs one forward and one backward pass of a micro-batch on fake CUDA tensors, which have shapes but no values, and
counts launches and bytes. With --code it compiles every Triton kernel for sm_90 with its real arguments, and counts
registers and spills. Needs PyTorch's CPU build, triton and a C++ compiler. `benchmarks/README.md` describes the columns
and what a rehearsal cannot show.
"""

import atexit
import os
import shutil
import sys
import tempfile
import warnings
from typing import Any

from benchmarks.fake_gpu import device
from benchmarks.shared.reporting import Results, arguments_of, error_text, parser_of, result_path, table, write_json

PRESETS = ("vanilla", "depth_attention", "moda", "attention_residuals", "attention_residuals_full", "dca",
           "denseformer", "mhc", "hyper_connections")  # fmt: skip
STEP = {
    "preset": "preset",
    "size": "size",
    "launches": "launches",
    "launches_forward_triton": "Triton",
    "launches_backward_triton": "backward",
    "gradient_sums": "sums",
    "moved_gb": "GB",
    "saved_gib": "saved",
    "estimated_saved_gib": "estimate",
    "peak_gib": "peak",
    "estimated_peak_gib": "estimate",
    "compilations": "compiled",
}
CODE = {
    "kernel": "kernel",
    "warps": "warps",
    "registers": "registers",
    "stack": "stack",
    "blocks_per_sm": "blocks/SM",
    "load_bits": "load bits",
}


def prepare() -> None:
    """Install the fake GPU, and let Triton compile into a temporary folder, so that every compilation is timed."""
    warnings.filterwarnings("ignore")
    os.environ |= {"DS_ACCELERATOR": "cpu", "TRITON_CACHE_DIR": tempfile.mkdtemp(prefix="depthlm-triton-")}
    os.environ.pop("TRITON_INTERPRET", None)
    atexit.register(shutil.rmtree, os.environ["TRITON_CACHE_DIR"], ignore_errors=True)
    device.install()


def markdown(results: Results) -> str:
    """Return a table of the steps, and one of the kernels with the largest values of all of their versions."""
    largest: dict[str, dict[str, Any]] = {}
    for version in (version for line in results["lines"] for version in line.get("machine_code", ())):
        worst = largest.setdefault(version["kernel"], dict(version))
        worst |= {key: max(worst[key], version[key]) for key in ("registers", "stack")}
        worst["blocks_per_sm"] = min(worst["blocks_per_sm"], version["blocks_per_sm"])
    tables = [table(STEP.values(), ([cell(line.get(key, "")) for key in STEP] for line in results["lines"]))]
    if largest:
        tables.append(table(CODE.values(), ([cell(largest[name][key]) for key in CODE] for name in sorted(largest))))
    return "\n\n".join(tables)


def cell(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}:{count}" for key, count in value.items())
    return f"{value:.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("overrides", nargs="*", help="as for train.py, such as training.activation_checkpointing=true")
    # separated by commas: with spaces, overrides would be taken for further values
    parser.add_argument("--presets", default=",".join(PRESETS), help="separated by commas (default: %(default)s)")
    parser.add_argument("--size", default="1.5b", help="sizes, separated by commas (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences (default: %(default)s)")
    parser.add_argument(
        "--precision",
        choices=("autocast", "bf16"),
        default="autocast",
        help="autocast: fp32 weights, as at ZeRO 0; bf16: bf16 weights, as at ZeRO 1 and above (default: %(default)s)",
    )
    parser.add_argument("--compile", action="store_true", help="count launches with training.compile=true")
    parser.add_argument("--code", action="store_true", help="compile the Triton kernels for sm_90")
    arguments = arguments_of(parser, markdown)
    try:
        prepare()
    except RuntimeError as error:
        parser.error(str(error))

    from rich.progress import track

    from benchmarks.fake_gpu.step import rehearse

    jobs = [(preset, size) for size in arguments.size.split(",") for preset in arguments.presets.split(",")]
    lines, errors = [], []
    for preset, size in track(jobs, "rehearsing", transient=True):
        overrides = [f"model={preset}", f"size={size}", "kernels=triton", *arguments.overrides]
        settings = arguments.micro_batch, arguments.precision, arguments.compile, arguments.code
        try:
            lines.append(rehearse(overrides, *settings))
        except Exception as error:
            # the other presets may succeed
            errors.append(f"{' '.join(overrides)}: {error_text(error)}")
    output = arguments.output or result_path("rehearsal")
    print(markdown(write_json(output, {"lines": lines, "errors": errors})))
    for line in lines:
        for place, count in line["host_synchronizations"].items():
            print(f"{line['preset']}: host synchronization: {place}, {count} times")
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    print(f"written to {output}")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
