"""The rungs of benchmarks/gpu.py, in order of worth."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent
MECHANISMS = ("depth_attention", "moda", "attention_residuals", "mhc", "denseformer", "dca", "attention_residuals_full")


@dataclass(frozen=True)
class Rung:
    """A measurement: a script of benchmarks/ that writes its results to the file after --output as it gets them.

    question: what it answers. minutes: its limit. arguments, rehearsal: of the script, on a GPU and in a rehearsal;
    {scratch} is a folder for large files. packages: modules without which the rung is skipped.
    """

    name: str
    question: str
    minutes: float
    script: str
    arguments: tuple[str, ...]
    rehearsal: tuple[str, ...]
    packages: tuple[str, ...] = ()

    def lacks(self) -> str | None:
        """Return why the rung cannot run, or None."""
        if not (BENCHMARKS / self.script).is_file():
            return f"benchmarks/{self.script} does not exist"
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f"packages that are not installed: {', '.join(missing)}" if missing else None


def run_rung(name: str, question: str, minutes: float) -> Rung:
    arguments = (name, "--scratch", "{scratch}")
    return Rung(name, question, minutes, "first_hour/runs.py", arguments, (*arguments, "--tiny"))


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# short steps of a tiny model
TINY_STEP = words("--size micro training.sequence_length=16 precision=fp32 --rounds 1")
RUNGS = (
    Rung(
        "device",
        "device, driver and libraries; speed of copies and of bf16 matrix products",
        0.5,
        "first_hour/machine.py",
        (),
        words("--megabytes 1 --width 64"),
    ),
    Rung(
        "kernels",
        "whether every operator's outputs and gradients are right, and 20 steps of every preset, in bf16 and fp32",
        2,
        "first_hour/correctness.py",
        (),
        words(
            "--tiny --tokens 4 --types float32 --operators depth_value_mix merged_attention --presets moda --steps 2"
        ),
    ),
    Rung(
        "tests",
        "whether the tests of the kernels pass on the device",
        2,
        "first_hour/device_tests.py",
        words(
            "tests/ops tests/model/test_kernels.py --processes 8 "
            "tests/training/checkpoint/test_saving.py::test_a_snapshot_of_a_gpu_is_in_pinned_memory"
        ),
        words("tests/ops/test_depth_reduce.py"),
        ("pytest", "xdist"),
    ),
    Rung(
        "vanilla",
        "vanilla at 1.5b: tokens/s, MFU, launches, peak memory against the estimate, eager and compiled",
        2,
        "first_hour/step.py",
        words("--size 1.5b --micro-batch 8"),
        (*TINY_STEP, *words("--micro-batch 2 --modes eager")),
    ),
    Rung(
        "mechanisms",
        "what each of seven mechanisms adds to a step at 1.5b, in us per token and memory",
        6,
        "mechanisms.py",
        (*words("--size 1.5b training.batch_size=4 --pairs --rounds 5 --presets"), *MECHANISMS),
        (*TINY_STEP, *words("training.batch_size=1 --threads 1 --pairs --presets moda mhc")),
    ),
    Rung(
        "operators",
        "every operator against PyTorch and against the floor, at 1.5b and 3b",
        2.5,
        "kernels.py",
        words("--size 1.5b 3b --length 2048 --rounds 5"),
        words("--size 1.5b --length 4 --rounds 1 --threads 1"),
    ),
    Rung(
        "peers",
        "the operators against Liger and fla",
        1,
        "peers.py",
        ("--time",),
        ("--time", "--tiny"),
        ("liger_kernel", "fla"),
    ),
    Rung(
        "moda",
        "MoDA in the thirteen settings of its paper, against flash attention",
        1,
        "kernels.py",
        words("--table moda_efficiency --rounds 3"),
        words("--table moda_efficiency --rounds 1 --threads 1 --divide 2048"),
    ),
    Rung(
        "3b",
        "vanilla at 3b, as at 1.5b",
        1.5,
        "first_hour/step.py",
        words("--size 3b --micro-batch 2"),
        (*TINY_STEP, *words("--micro-batch 1 --modes eager")),
    ),
    Rung(
        "inference",
        "what the mechanisms add to prefill and decoding at 1.5b",
        1,
        "inference.py",
        (*words("size=1.5b --prompt 1024 --new 32 --rounds 3 --presets"), *MECHANISMS),
        words("size=micro --prompt 8 --new 2 --rounds 1 --threads 1 --presets moda"),
    ),
    run_rung("fp16", "whether fp16 trains, and its loss scale doubles", 1),
    run_rung("resume", "whether a run that is killed while it saves asynchronously resumes with the same losses", 2),
    run_rung("gpu_hour", "budget=gpu_hour at 1.5b, cut to two minutes", 2.5),
)
