"""The device, and runs: tests, fp16's loss scale, a kill while a checkpoint is saved.

    python benchmarks/rungs/runs.py device|tests|fp16|resume --scratch FOLDER --output JSON [--tiny]

The text is the source of Python's standard library in bytes, so nothing is downloaded. The folder must not exist; it is
removed at the end.
"""

import math
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.interleaved import copying, measure
from benchmarks.shared.reporting import (
    Results,
    arguments_of,
    error_text,
    headed,
    parser_of,
    publish,
    table,
    write_json,
)
from depthlm.locations import REPOSITORY
from depthlm.machine import environment
from depthlm.machine.environment import driver_version
from depthlm.machine.memory import available_memory
from depthlm.ops.backend import missing
from depthlm.runs.records import read_run

RUN = ["data=stdlib", "data.tokenizer=bytes", "tracker=none", "training.sample=null", "training.log_every=1"]
TINY = ["size=micro", "precision=fp32", "training.sequence_length=32", "training.batch_size=4",
        "data.max_tokens=50K", "training.num_threads=1", "training.validation_tokens=256"]  # fmt: skip
# the tests that use a GPU where there is one
TESTS = ["tests/ops", "tests/model/test_ops.py",
         "tests/training/checkpoint/test_saving.py::test_a_snapshot_of_a_gpu_is_in_pinned_memory"]  # fmt: skip
# processes of the tests, beside the other rungs of their part
TEST_PROCESSES = 9
# what pytest says of a test, and seconds between two writings of their numbers
OUTCOME, EVERY = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b.*::|::.*\b(PASSED|FAILED|ERROR|SKIPPED)\b"), 5.0
SETTINGS = "name,driver_version,pstate,clocks.max.sm,power.limit,memory.total,memory.used,mig.mode.current"
# the largest relative difference of a loss of a resumed run from that of an undisturbed one
DIFFERENCE = 0.01


def command(scratch: Path, name: str, overrides: list[str]) -> list[str]:
    paths = [f"data.path={scratch}/tokens", f"output_dir={scratch}/{name}"]
    return [sys.executable, "train.py", *RUN, *overrides, *paths]


def finish(scratch: Path, name: str, overrides: list[str]) -> list[dict[str, Any]]:
    """Train a run to its end, or resume it, and return its rows of metrics."""
    subprocess.run(command(scratch, name, overrides), cwd=REPOSITORY, check=True)
    return read_run(scratch / name).rows


def device(scratch: Path, tiny: bool) -> Iterator[Results]:
    """Yield the settings of the device, whether Triton can run, and its speed of copies and of matrix products."""
    kind, width = environment.device_type(), 64 if tiny else 8192
    a, b = (torch.randn(width, width, device=kind, dtype=torch.bfloat16) for _ in range(2))
    copied = 2**20 if tiny else 2**30
    seconds = measure({"copy": copying(copied), "product": lambda: a @ b}, rounds=5, steps=10)
    try:
        command = ["nvidia-smi", f"--query-gpu={SETTINGS}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        settings = (done.stdout + done.stderr).strip()
    except (OSError, subprocess.SubprocessError) as error:
        settings = error_text(error)
    yield {
        "memory_gib": available_memory(torch.device(kind, 0) if kind == "cuda" else torch.device(kind), 1) / 2**30,
        "driver": driver_version(),
        "nvidia_smi": settings,
        "cuda": torch.version.cuda,
        "fast_precision": environment.fast_precision(kind, environment.MIN_BF16_WIDTH),
        "triton_missing": missing(kind),
        "copied_gb_per_second": 2 * copied / min(seconds["copy"]) / 1e9,
        "bf16_tflops": 2 * width**3 / min(seconds["product"]) / 1e12,
        "passed": True,
    }


def tests(scratch: Path, tiny: bool) -> Iterator[Results]:
    """Run tests, and yield their numbers by outcome as they end; in the end also the message of each failure."""
    scratch.mkdir(parents=True, exist_ok=True)
    report = scratch / "report.xml"
    # verbose despite the -q of pyproject.toml, so that the log has the outcome of every test before the limit
    processes = 0 if tiny else min(TEST_PROCESSES, environment.cores())
    options = ["-vv", "--tb=short", f"--numprocesses={processes}", f"--junitxml={report}"]
    chosen = ["tests/ops/test_precision.py"] if tiny else TESTS
    counts, failed, written = dict.fromkeys(("passed", "failed", "skipped"), 0), [], time.monotonic()
    pytest = [sys.executable, "-m", "pytest", *options, *chosen]
    with subprocess.Popen(pytest, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if outcome := OUTCOME.search(line):
                word = outcome[1] or outcome[2]
                counts["failed" if word == "ERROR" else word.lower()] += 1
                failed += [line.strip()[:300]] if word in ("FAILED", "ERROR") else []
            if time.monotonic() - written > EVERY:
                written = time.monotonic()
                yield {**counts, "failures": dict.fromkeys(failed, "")}
    cases = list(ElementTree.parse(report).iter("testcase"))
    failures = {
        f"{case.get('classname')}.{case.get('name')}": " ".join((problem.get("message") or "").split())[:300]
        for case in cases
        for problem in case
        if problem.tag in ("failure", "error")
    }
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failures) - skipped
    yield {"passed": passed, "failed": len(failures), "skipped": skipped, "failures": failures}


def fp16(scratch: Path, tiny: bool) -> Iterator[Results]:
    """Train in fp16 with a loss scale that soon doubles. On a CPU, which has no fp16, train in fp32."""
    shape = ["size=360m", "precision=fp16", "precision.loss_scale_window=20", "training.sequence_length=1024"]
    run = [*(TINY if tiny else shape), "model=moda", "deepspeed=zero1", f"training.max_steps={6 if tiny else 60}",
           "training.validate_every=null", "training.checkpoint_every=1000000"]  # fmt: skip
    curve = finish(scratch, "fp16", run)
    losses, scales = ([row[key] for row in curve] for key in ("loss", "loss_scale"))
    doubles = any(later > earlier for earlier, later in pairwise(scales))
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    yield {
        "first_loss": finite[0],
        "last_loss": finite[-1],
        "skipped_losses": len(losses) - len(finite),
        "loss_scales": scales,
        "passed": finite[-1] < finite[0] and min(scales) >= 1.0 and (tiny or doubles),
    }


def resume(scratch: Path, tiny: bool) -> Iterator[Results]:
    """Kill a run while it saves a checkpoint, resume it, and compare its losses with those of an undisturbed run."""
    steps, every = (30, 5) if tiny else (45, 15)
    # layers enough that the kill hits a checkpoint while it is written, and few enough that writing it takes seconds
    shape = TINY if tiny else ["size=360m", "size.num_layers=8", "training.sequence_length=512",
                               "training.batch_size=16"]  # fmt: skip
    run = [*shape, f"training.max_steps={steps}", f"training.checkpoint_every={every}", "training.keep_last=1",
           "training.async_checkpoint=true", "training.validate_every=null", "deterministic=true"]  # fmt: skip
    undisturbed = finish(scratch, "undisturbed", run)
    results: Results = {"first_loss": undisturbed[0]["loss"], "last_loss_undisturbed": undisturbed[-1]["loss"]}
    yield results
    # the disk needs space for one run's checkpoints only
    shutil.rmtree(scratch / "undisturbed")
    killed = scratch / "killed"
    process = subprocess.Popen(command(scratch, "killed", run), cwd=REPOSITORY)
    newest = killed / "checkpoints" / "latest"
    # with a complete checkpoint, and while the next one is being written
    while process.poll() is None and not (newest.exists() and any(newest.parent.glob(".saving-*"))):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise RuntimeError(f"the run ended with exit status {process.returncode} before it was killed")
    results |= {"killed_at_step": read_run(killed).step, "resumed_from": newest.read_text().strip()}
    yield results
    resumed = finish(scratch, "killed", run)
    differences = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(resumed, undisturbed, strict=True)]
    yield results | {
        "last_loss": resumed[-1]["loss"],
        "largest_loss_difference": max(differences),
        "bitwise_equal": all(a["loss"] == b["loss"] for a, b in zip(resumed, undisturbed, strict=True)),
        "passed": max(differences) <= DIFFERENCE,
    }


RUNS: dict[str, Callable[[Path, bool], Iterator[Results]]] = {
    "device": device, "tests": tests, "fp16": fp16, "resume": resume
}  # fmt: skip


def markdown(results: Results) -> str:
    hidden = ("machine", "rung", "loss_scales", "failures")
    shown = {key.replace("_", " "): value for key, value in results.items() if key not in hidden}
    shown |= results.get("failures", {})
    if scales := results.get("loss_scales"):
        shown["loss scale"] = f"{scales[0]:g} at first, {scales[-1]:g} at last"
    lines = ((key, f"{value:.5g}" if isinstance(value, float) else str(value)) for key, value in shown.items())
    return headed(results, table(("", ""), lines))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--scratch", type=Path, required=True, help="folder for checkpoints, up to 12 GB")
    parser.add_argument("--tiny", action="store_true", help="tiny runs, for a test on a CPU")
    arguments = arguments_of(parser, markdown)
    try:
        # each yields more than before, and the last one is complete
        for results in RUNS[arguments.run](arguments.scratch.resolve(), arguments.tiny):
            write_json(arguments.output, results)
    finally:
        shutil.rmtree(arguments.scratch, ignore_errors=True)
    publish(arguments.output, results, markdown)
    return int(not results["passed"] or bool(results.get("failed")))


if __name__ == "__main__":
    sys.exit(main())
