"""The cost of saving and resuming.

    python benchmarks/checkpoint.py [--rounds 3] [--steps 12]

Saving as in train.py (ZeRO 0, fp32) is compared with `dd conv=fdatasync` of as many bytes as the checkpoint has, in
turn in every round, and with asynchronous saving during training. Resuming at step 1 000 000 is compared with resuming
at step 10 of the same small run, with as many rows of metrics as the run would have.
"""

import json
import shutil
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import depthlm
from benchmarks.shared.decoders import training_of
from benchmarks.shared.reporting import Results, arguments_of, headed, parser_of, publish, result_path, table
from depthlm.config import Config
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.runs.manifest import seal
from depthlm.training import train
from depthlm.training.checkpoint.saving import Saver

SIZE = "360m"
FIRST, LATER, ROW_EVERY = 10, 1_000_000, 10
# seconds until the system has reclaimed freed memory: writing is faster just after a large file is removed
SETTLE = 8.0


def written_by_dd(size: int, folder: Path) -> float:
    """Return the seconds that dd takes to write this many bytes to the disk; zeros, which cost nothing to read."""
    target = folder / "copy"
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=4M", f"count={size}", "iflag=count_bytes", "conv=fdatasync"]
    started = time.perf_counter()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    target.unlink()
    return seconds


def saving(config: Config, rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    """Return the seconds of saving and of dd in every round, and the cost of asynchronous saving to training."""
    trained = training_of(config, start_distributed(ranks()))
    trained.step()  # creates the optimizer states
    about = {"corpus": "", "world_size": 1, "stage": 0, "experts": 1, "config": asdict(config)}
    saver = Saver(trained.engine, folder, replace(config.training, keep_last=1), about)
    saves, copies = [], []
    for number in range(1, rounds + 2):
        before = saver.seconds
        time.sleep(SETTLE)
        saver.save({"step": number}, last=False)
        checkpoint = folder / "checkpoints" / f"step-{number:08d}"
        size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        time.sleep(SETTLE)
        copied = written_by_dd(size, folder)
        if number > 1:  # the first save creates the folders and allocates memory
            saves.append(saver.seconds - before)
            copies.append(copied)
    saver = Saver(trained.engine, folder, replace(config.training, keep_last=1, async_checkpoint=True), about)
    waits, losses = [], []
    for number in range(100, 101 + rounds):
        started = time.perf_counter()
        for _ in range(steps):
            trained.step()
        alone = time.perf_counter() - started
        before, started, taken = saver.seconds, time.perf_counter(), 0
        saver.save({"step": number}, last=False)
        while saver.busy() or taken < steps:
            trained.step()
            taken += 1
        saver.finish()
        if number > 100:
            losses.append(time.perf_counter() - started - alone * taken / steps)
            waits.append(saver.seconds - before)
    trained.engine.destroy()
    return {
        "gib": size / 2**30,
        "seconds": saves,
        "dd_seconds": copies,
        "ratio": statistics.median(ours / theirs for ours, theirs in zip(saves, copies, strict=True)),
        "step_seconds": alone / steps,
        "async_wait_seconds": waits,
        "async_lost_seconds": losses,
        "async_ratio": statistics.median(losses) / statistics.median(copies),
    }


def resuming(rounds: int, folder: Path) -> dict[str, Any]:
    """Return the seconds from the start of a run at a checkpoint until one more step is trained and saved."""
    run = ["size=micro", "data=stdlib", "data.tokenizer=bytes", "data.max_tokens=200K", "tracker=none",
           "training.sequence_length=64", "training.batch_size=4", "training.max_steps=2000000", "schedule=constant",
           f"training.log_every={ROW_EVERY}", "training.validate_every=null", "training.sample=null",
           f"data.path={folder}/tokens"]  # fmt: skip

    def at(step: int, stop: int, name: str) -> Config:
        return depthlm.compose([*run, f"output_dir={folder}/{name}", f"training.stop_after={stop}"])

    train(at(FIRST, FIRST, "first"))
    shutil.copytree(folder / "first", folder / "later")
    checkpoint = folder / f"later/checkpoints/step-{FIRST:08d}"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(seal({**manifest, "step": LATER})))
    checkpoint.rename(checkpoint.with_name(f"step-{LATER:08d}"))
    row = json.loads((folder / "first/metrics.jsonl").read_text().splitlines()[-1])
    rows = (json.dumps({**row, "step": step}) + "\n" for step in range(ROW_EVERY, LATER + 1, ROW_EVERY))
    (folder / "later/metrics.jsonl").write_text("".join(rows))
    seconds: dict[str, list[float]] = {"first": [], "later": []}
    for number in range(rounds + 1):
        for name, step in (("first", FIRST), ("later", LATER)):
            shutil.copytree(folder / name, folder / "again")
            started = time.perf_counter()
            train(at(step, step + 1, "again"))
            if number:
                seconds[name].append(time.perf_counter() - started)
            assert (folder / f"again/checkpoints/step-{step + 1:08d}").exists()
            shutil.rmtree(folder / "again")
    pairs = zip(seconds["later"], seconds["first"], strict=True)
    return {**{f"{name}_seconds": times for name, times in seconds.items()},
            "ratio": statistics.median(later / first for later, first in pairs)}  # fmt: skip


def markdown(results: Results) -> str:
    saved, resumed = results["saving"], results["resuming"]
    middle = statistics.median
    lines = [
        (f"dd of {saved['gib']:.2f} GiB", f"{middle(saved['dd_seconds']):.2f}", "1"),
        ("saving", f"{middle(saved['seconds']):.2f}", f"{saved['ratio']:.2f} (target 1.3)"),
        ("lost to asynchronous saving", f"{middle(saved['async_lost_seconds']):.2f}", f"{saved['async_ratio']:.2f}"),
        ("of that, waiting for the copy", f"{middle(saved['async_wait_seconds']):.2f}", ""),
        (f"resuming at step {FIRST}", f"{middle(resumed['first_seconds']):.3f}", "1"),
        (f"resuming at step {LATER}", f"{middle(resumed['later_seconds']):.3f}", f"{resumed['ratio']:.2f}"),
    ]
    return headed(results, table(("operation", "seconds, median", "ratio"), lines))


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--steps", type=int, default=12, help="minimum steps to train while a checkpoint is written")
    arguments = arguments_of(parser, markdown)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        config = depthlm.compose(
            [f"size={SIZE}", "data.tokenizer=bytes", "precision=fp32", "training.sequence_length=128",
             "training.batch_size=1", f"output_dir={folder}/run"]
        )  # fmt: skip
        results: Results = {
            "size": SIZE,
            "saving": saving(config, arguments.rounds, arguments.steps, Path(folder)),
            "resuming": resuming(max(5, arguments.rounds), Path(folder)),
        }
    publish(arguments.output or result_path("checkpoint"), results, markdown)


if __name__ == "__main__":
    main()
