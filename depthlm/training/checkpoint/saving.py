"""Writing checkpoints: aside, synced, renamed, then pointed to by `latest`; at once, or while training goes on.

A checkpoint exists when its manifest does. What fails on the way, as on a full disk, leaves the earlier ones whole and
the run alive.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from depthlm.config.schema import Training
from depthlm.distributed.collectives import on_rank_0
from depthlm.files import LargeFile, digest, replace_text, sync, usual_mode
from depthlm.runs.checkpoints import MANIFEST, STATE, WEIGHTS, checkpoint_path, prune
from depthlm.training.checkpoint.snapshot import Snapshot, nbytes
from depthlm.training.engine.sharding import whole_weights

log = logging.getLogger("depthlm")


class NotSavedError(RuntimeError):
    """The checkpoint that ends a run could not be written."""


@dataclass(frozen=True)
class Writing:
    """A checkpoint on its way to the disk. files: of this rank, the name of each in it and the digest to come."""

    aside: Path
    final: Path
    manifest: dict[str, Any]
    files: dict[str, Future[str]]


class Saver:
    """The checkpoints that a run writes. All but `due` and `busy` is collective: every rank calls it.

    about: what goes into every manifest besides the progress of the run. seconds: how long training has waited.
    """

    def __init__(self, engine: Any, directory: Path, training: Training, about: dict[str, Any]) -> None:
        self.engine, self.directory, self.training, self.about = engine, directory, training, about
        self.first = torch.distributed.get_rank() == 0
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="checkpoint")
        self.snapshot = Snapshot()
        self.writing: Writing | None = None
        self.saved_at, self.seconds = time.monotonic(), 0.0

    def due(self) -> bool:
        """Whether, by this rank's clock, training.checkpoint_minutes have passed since the last checkpoint."""
        minutes = self.training.checkpoint_minutes
        return minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes

    def busy(self) -> bool:
        """Whether this rank's part of a checkpoint is still being written."""
        return self.writing is not None and not all(file.done() for file in self.writing.files.values())

    def save(self, progress: dict[str, Any], *, last: bool) -> None:
        """Write `checkpoints/step-<progress["step"]>`; where that fails the run goes on, and the log says why.

        With training.async_checkpoint it is written from a copy in memory while training goes on, and `finish` makes it
        whole. last: nothing comes after it, so it is waited for. Raises NotSavedError where that one fails.
        """
        if self.writing is not None:
            self.finish()
        started = self.saved_at = time.monotonic()
        later = self.training.async_checkpoint and not last
        failure = self._start(progress, copy=later)
        self.seconds += time.monotonic() - started
        if failure is None and not later:
            failure = self.finish()
        if failure is not None and last:
            raise NotSavedError(
                f"the last checkpoint could not be written: {failure}. Make room, and the same command goes on from "
                "the one before"
            )

    def finish(self) -> str | None:
        """Make whole what is being written, as soon as all ranks have written their parts; returns why it failed."""
        assert self.writing is not None
        started = time.monotonic()
        writing, self.writing = self.writing, None
        digests, failure = {}, None
        for name, file in writing.files.items():
            try:
                digests[name] = file.result()
            except Exception as error:  # torch and safetensors hide an OSError behind their own
                failure = f"{name}: {error}"
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, (digests, failure))
        failure = next((text for _, text in parts if text is not None), None)
        everything = {name: value for part, _ in parts for name, value in part.items()}
        failure = failure or self._on_rank_0(lambda: self._publish(writing, everything))
        if failure is None:
            log.info("saved %s", writing.final)
        else:
            self._tell(writing.aside, failure)
        self.seconds += time.monotonic() - started
        return failure

    def _start(self, progress: dict[str, Any], copy: bool) -> str | None:
        final = checkpoint_path(self.directory, progress["step"])
        aside = final.with_name(f".saving-{final.name}")
        states = collect_states(self.engine, aside)
        if copy:
            states = {path: self.snapshot.copy(path.name, state) for path, state in states.items()}
        # at ZeRO 3 a weight is whole for a moment only
        keep = self.snapshot.copy if copy or self.about["stage"] == 3 else _on_cpu
        weights = whole_weights(self.engine, keep)
        size = torch.tensor([sum(nbytes(part) for part in (*states.values(), weights))], device=self.engine.device)
        torch.distributed.all_reduce(size)
        failure = self._on_rank_0(lambda: _make_room(aside, int(size.item())))
        if failure is not None:
            self._tell(aside, failure)
            return failure
        files = {
            str(path.relative_to(aside)): self.pool.submit(_write_state, path, state) for path, state in states.items()
        }
        if self.first:
            files[WEIGHTS] = self.pool.submit(_write_weights, aside / WEIGHTS, weights)
        self.writing = Writing(aside, final, {**self.about, **progress}, files)
        return None

    def _on_rank_0(self, action: Callable[[], None]) -> str | None:
        """Do something on the first rank; every rank learns why it failed."""
        try:
            on_rank_0(action)
        except OSError as error:
            return str(error)
        return None

    def _publish(self, writing: Writing, digests: dict[str, str]) -> None:
        for rows in ("metrics.jsonl", "bad_batches.jsonl", "blocks.jsonl"):
            if (self.directory / rows).exists():
                sync(self.directory / rows)
        manifest = {**writing.manifest, "files": dict(sorted(digests.items()))}
        replace_text(writing.aside / MANIFEST, json.dumps(manifest, indent=1))
        for folder in (writing.aside / STATE, writing.aside):
            sync(folder)
        checkpoints = writing.final.parent
        shutil.rmtree(writing.final, ignore_errors=True)
        os.replace(writing.aside, writing.final)
        sync(checkpoints)
        training = self.training
        prune(
            checkpoints,
            writing.final,
            keep_last=training.keep_last,
            keep_every=training.keep_every,
            checkpoint_every=training.checkpoint_every,
        )
        try:
            replace_text(checkpoints / "latest", writing.final.name + "\n")
            sync(checkpoints)
        except OSError as error:
            log.warning("%s cannot be written (%s); the checkpoint is whole", checkpoints / "latest", error)

    def _tell(self, aside: Path, failure: str) -> None:
        if self.first:
            shutil.rmtree(aside, ignore_errors=True)
        log.error("%s was not saved: %s; the earlier ones are whole", aside.name.removeprefix(".saving-"), failure)


class Collector:
    """Stands in for DeepSpeed's checkpoint engine, and keeps what that would write."""

    def __init__(self, checkpoint_engine: Any) -> None:
        self.checkpoint_engine = checkpoint_engine
        self.states: dict[Path, Any] = {}

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Keep the content of a file."""
        self.states[Path(path)] = state_dict

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing: there may be no room for a folder."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.checkpoint_engine, name)


def collect_states(engine: Any, folder: Path) -> dict[Path, Any]:
    """This rank's files of DeepSpeed's checkpoint in a folder, and what belongs into each; nothing is written."""
    theirs, collector = engine.checkpoint_engine, Collector(engine.checkpoint_engine)
    engine.checkpoint_engine = collector
    # it would copy a script of its own into the folder
    engine._copy_recovery_script = lambda _: None
    try:
        engine.save_checkpoint(str(folder), tag=STATE, save_latest=False)
    finally:
        engine.checkpoint_engine = theirs
    return collector.states


def _make_room(aside: Path, needed: int) -> None:
    """An empty folder for so many bytes. Raises OSError where they are not free."""
    # of saves that were killed, which may be what fills the disk
    for left_over in (*aside.parent.glob(".saving-*"), *aside.parent.glob(".universal-*")):
        shutil.rmtree(left_over, ignore_errors=True)
    (aside / STATE).mkdir(parents=True)
    free = shutil.disk_usage(aside).free
    if free < needed:
        raise OSError(f"{needed / 2**30:.2f} GiB are needed in {aside.parent}, and {free / 2**30:.2f} GiB are free")


def _on_cpu(_: str, tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()


def _write_state(path: Path, state: dict[str, Any]) -> str:
    file = LargeFile(path)
    try:
        torch.save(state, cast(IO[bytes], file))
    finally:
        value = file.close()
    return value


def _write_weights(path: Path, weights: dict[str, Tensor]) -> str:
    save_file(weights, path, metadata={"format": "pt"})
    usual_mode(path)
    sync(path)
    return digest(path)
