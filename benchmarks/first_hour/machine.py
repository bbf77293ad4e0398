"""The device: its name, driver and libraries, whether Triton can run, and its speed of copies and of matrix products.

python benchmarks/first_hour/machine.py --output device.json [--megabytes 1024] [--width 8192]
python benchmarks/first_hour/machine.py --name       # only the name of the device
"""

import subprocess
import sys
from typing import Any

import torch

from benchmarks.shared.interleaved import measure
from benchmarks.shared.reporting import Results, arguments_of, error_text, parser_of, publish, table
from depthlm.machine import environment
from depthlm.machine.environment import driver_version
from depthlm.machine.memory import available_memory
from depthlm.ops.backend import missing

ROUNDS = 5
QUERY = "name,driver_version,pstate,clocks.max.sm,power.limit,memory.total,memory.used,mig.mode.current"


def query_driver() -> str:
    """Return what nvidia-smi says about the settings of QUERY, or why it says nothing."""
    try:
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return error_text(error)
    return (done.stdout + done.stderr).strip()


def copies_per_second(device: str, megabytes: int) -> float:
    """Return the bytes that copies read and write per second."""
    source = torch.ones(megabytes * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(measure({"copy": lambda: target.copy_(source)}, ROUNDS, steps=10)["copy"])
    return 2 * source.numel() / seconds


def products_per_second(device: str, width: int) -> float:
    """Return the FLOP/s of a product of two square matrices in bf16."""
    a, b = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = min(measure({"product": lambda: a @ b}, ROUNDS, steps=10)["product"])
    return 2 * width**3 / seconds


def describe(megabytes: int, width: int) -> dict[str, Any]:
    device = environment.device_type()
    on_gpu = device == "cuda"
    capability = ".".join(map(str, torch.cuda.get_device_capability())) if on_gpu else None
    return {
        "name": environment.device_name(device),
        "capability": capability,
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count if on_gpu else None,
        "memory_gib": available_memory(torch.device(device, 0) if on_gpu else torch.device(device), 1) / 2**30,
        "driver": driver_version(),
        "nvidia_smi": query_driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "fast_precision": environment.fast_precision(device),
        "triton_missing": missing(device),
        "copied_bytes_per_second": copies_per_second(device, megabytes),
        "bf16_flops_per_second": products_per_second(device, width),
    }


def markdown(results: Results) -> str:
    versions = results["machine"]["versions"]
    lines = [
        ("device", str(results["name"])),
        ("compute capability", str(results["capability"])),
        ("memory", f"{results['memory_gib']:.1f} GiB"),
        ("driver", str(results["driver"])),
        ("CUDA of torch", str(results["cuda"])),
        ("torch, Triton, DeepSpeed", ", ".join(str(versions[name]) for name in ("torch", "triton", "deepspeed"))),
        ("Python", results["machine"]["python"]),
        ("Triton's kernels", results["triton_missing"] or "can run"),
        ("copies", f"{results['copied_bytes_per_second'] / 1e9:,.0f} GB/s"),
        ("bf16 matrix products", f"{results['bf16_flops_per_second'] / 1e12:,.3g} TFLOP/s"),
    ]
    return table(("", ""), lines)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--name", action="store_true", help="print the name of the GPU, or fail if torch cannot use it")
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--width", type=int, default=8192)
    arguments = arguments_of(parser, markdown)
    if arguments.name:
        if error := environment.device_error("cuda"):
            print(error, file=sys.stderr)
            return 2
        print(environment.device_name("cuda"))
        return 0
    publish(arguments.output, describe(arguments.megabytes, arguments.width), markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
