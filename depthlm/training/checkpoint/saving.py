"""Save checkpoints, synchronously or asynchronously: write to a staging directory, sync, rename, update `latest`.

A checkpoint is complete once its manifest exists. A failure while saving, such as a full disk, leaves earlier
checkpoints intact and the run alive.
"""

import copy
import json
import logging
import os
import shutil
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_leaves

from depthlm.config.schema import Training
from depthlm.distributed.process_group import gather, on_rank_0
from depthlm.files import LargeFile, digest, replace_text, set_default_mode, sync
from depthlm.run_directory import MANIFEST, RunDirectory
from depthlm.runs.checkpoints import STATE, WEIGHTS, prune, remove_leftovers
from depthlm.runs.manifest import seal
from depthlm.training.engine import Engine

log = logging.getLogger("depthlm")


class NotSavedError(RuntimeError):
    """Raised when the last checkpoint of a run could not be written."""


@dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint that is being written. files: by name, the pending digest of each file that this rank writes."""

    staging: Path
    final: Path
    manifest: dict[str, Any]
    files: dict[str, Future[str]]


class Saver:
    """Writes the checkpoints of a run. All methods except `due` and `busy` are collective: every rank calls them.

    about: entries of every manifest besides the progress of the run. saved: the step of the run's newest checkpoint, if
    it has one. seconds: how long saving has blocked training.
    """

    def __init__(
        self, engine: Engine, directory: Path, training: Training, about: dict[str, Any], saved: int | None = None
    ) -> None:
        self.engine, self.training, self.about, self.saved = engine, training, about, saved
        self.run = RunDirectory(directory)
        self.is_rank_0 = torch.distributed.get_rank() == 0
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="checkpoint")
        self.snapshot = Snapshot()
        self.writing: PendingCheckpoint | None = None
        self.saved_at, self.seconds = time.monotonic(), 0.0

    def due(self) -> bool:
        """Return whether training.checkpoint_minutes have passed since the last checkpoint, by this rank's clock."""
        minutes = self.training.checkpoint_minutes
        return minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes

    def busy(self) -> bool:
        """Return whether this rank is still writing its part of a checkpoint."""
        return self.writing is not None and not all(file.done() for file in self.writing.files.values())

    def save(self, progress: dict[str, Any], *, last: bool) -> None:
        """Write `checkpoints/step-<progress["step"]>` unless it is written already; a failure is logged.

        With training.async_checkpoint it is written from a copy in memory while training continues, and `finish`
        completes it. last: the last checkpoint of the process is written synchronously; NotSavedError if it fails.
        """
        if self.writing is not None:
            self.finish()
        if self.saved == progress["step"]:
            return
        started = self.saved_at = time.monotonic()
        asynchronous = self.training.async_checkpoint and not last
        failure = self._start(progress, copy=asynchronous)
        self.seconds += time.monotonic() - started
        if failure is None and not asynchronous:
            failure = self.finish()
        if failure is not None and last:
            raise NotSavedError(
                f"the last checkpoint could not be written: {failure}. Free some disk space and run the same command "
                "again to resume from the checkpoint before it"
            )

    def finish(self) -> str | None:
        """Wait until all ranks have written their parts, and complete the checkpoint. Returns the failure, if any."""
        assert self.writing is not None
        started = time.monotonic()
        writing, self.writing = self.writing, None
        digests: dict[str, str] = {}
        failure: str | None = None
        for name, file in writing.files.items():
            try:
                digests[name] = file.result()
            except Exception as error:  # torch and safetensors wrap an OSError in their own exceptions
                failure = f"{name}: {error}"
        parts = gather((digests, failure))
        failure = next((text for _, text in parts if text is not None), None)
        all_digests = {name: value for part, _ in parts for name, value in part.items()}
        failure = failure or self._on_rank_0(lambda: self._publish(writing, all_digests))
        if failure is None:
            self.saved = writing.manifest["step"]
            log.info("saved %s", writing.final.relative_to(self.run.path))
        else:
            self._report_failure(writing.staging, failure)
        self.seconds += time.monotonic() - started
        return failure

    def _start(self, progress: dict[str, Any], copy: bool) -> str | None:
        final, staging = self.run.checkpoint(progress["step"]), self.run.staging(progress["step"])
        states = self.engine.state(staging)
        if copy:
            states = {path: self.snapshot.copy(path.name, state) for path, state in states.items()}
        # at ZeRO 3 a weight is gathered only for a moment, so it is copied
        keep = self.snapshot.copy if copy or self.about["stage"] == 3 else _on_cpu
        weights = self.engine.weights(keep)
        size = torch.tensor([sum(nbytes(part) for part in (*states.values(), weights))], device=self.engine.device)
        torch.distributed.all_reduce(size)
        failure = self._on_rank_0(lambda: _make_room(self.run, staging, int(size.item())))
        if failure is not None:
            self._report_failure(staging, failure)
            return failure
        files = {
            str(path.relative_to(staging)): self.pool.submit(_write_state, path, state)
            for path, state in states.items()
        }
        if self.is_rank_0:
            files[WEIGHTS] = self.pool.submit(_write_weights, staging / WEIGHTS, weights)
        self.writing = PendingCheckpoint(staging, final, {**self.about, **progress}, files)
        return None

    def _on_rank_0(self, action: Callable[[], None]) -> str | None:
        """Run an action on rank 0. Returns on every rank why it failed, or None."""
        try:
            on_rank_0(action)
        except OSError as error:
            return str(error)
        return None

    def _publish(self, writing: PendingCheckpoint, digests: dict[str, str]) -> None:
        for file in self.run.row_files:
            if file.exists():
                sync(file)
        # their names in the run directory, and that of the folder of the checkpoints
        sync(self.run.path)
        sync(writing.staging / STATE)
        manifest = seal({**writing.manifest, "files": dict(sorted(digests.items()))})
        replace_text(writing.staging / MANIFEST, json.dumps(manifest, indent=1))
        shutil.rmtree(writing.final, ignore_errors=True)
        os.replace(writing.staging, writing.final)
        sync(self.run.checkpoints)
        training = self.training
        prune(
            self.run.path,
            writing.final,
            keep_last=training.keep_last,
            keep_every=training.keep_every,
            checkpoint_every=training.checkpoint_every,
        )
        try:
            if not self.run.saved.exists():
                self.run.saved.touch()
                sync(self.run.path)
            replace_text(self.run.latest, writing.final.name + "\n")
        except OSError as error:
            log.warning("%s cannot be written (%s); the checkpoint itself is complete", self.run.latest, error)

    def _report_failure(self, staging: Path, failure: str) -> None:
        if self.is_rank_0:
            shutil.rmtree(staging, ignore_errors=True)
        log.error(
            "%s was not saved: %s; earlier checkpoints are intact", staging.name.removeprefix(".saving-"), failure
        )


class Snapshot:
    """Copies of the state in reused buffers: allocating memory for every copy can be slower than the disk."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def copy(self, name: str, state: Any) -> Any:
        """Return the nested state with every tensor copied; valid until the next copy of that name."""
        if isinstance(state, Tensor):
            return self._copy(name, state.detach())
        if isinstance(state, dict):
            return type(state)({key: self.copy(f"{name}/{key}", value) for key, value in state.items()})
        if type(state) in (list, tuple):
            return type(state)(self.copy(f"{name}/{index}", value) for index, value in enumerate(state))
        # an object that training changes, such as the fp16 loss scaler
        return copy.deepcopy(state)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self.buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            # the earlier buffer is freed first
            self.buffers.pop(name, None)
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
            if tensor.is_cuda:
                pin(buffer)
            self.buffers[name] = buffer
        return buffer.copy_(tensor)


def pin(buffer: Tensor) -> None:
    """Make the memory of a tensor page-locked until the tensor is freed, so that a GPU copies to it directly.

    PyTorch's allocator of pinned memory would round its size up to a power of two. Raises: torch.cuda.CudaError, for
    example if the system does not allow to lock so much memory.
    """
    if buffer.nbytes:
        cuda, address = torch.cuda.cudart(), buffer.data_ptr()
        torch.cuda.check_error(int(cuda.cudaHostRegister(address, buffer.nbytes, 0)))
        weakref.finalize(buffer, cuda.cudaHostUnregister, address)


def nbytes(state: Any) -> int:
    """Return the bytes of memory behind all tensors in a nested state; shared storage is counted once."""
    storages = [x.untyped_storage() for x in tree_leaves(state) if isinstance(x, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _make_room(run: RunDirectory, staging: Path, needed: int) -> None:
    """Create an empty staging directory. Raises OSError if fewer than `needed` bytes are free on the disk."""
    remove_leftovers(run)
    # without parents: a run directory that was removed must not come back
    run.checkpoints.mkdir(exist_ok=True)
    staging.mkdir()
    (staging / STATE).mkdir()
    free = shutil.disk_usage(staging).free
    if free < needed:
        raise OSError(f"{needed / 2**30:.2f} GiB are needed in {staging.parent}, and {free / 2**30:.2f} GiB are free")


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
    set_default_mode(path)
    sync(path)
    return digest(path)
