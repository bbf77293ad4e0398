"""Checkpoints of another number of ranks, of experts spread over another number of ranks, or another ZeRO stage.

What DeepSpeed 0.19.8 can load:

    saved -> loaded stage  same number of ranks  another number of ranks
    0 -> 0                 direct                direct
    1, 2 -> 1, 2           direct                DeepSpeed's universal checkpoint
    3 -> 3                 direct                DeepSpeed's universal checkpoint
    any other              refused               refused

The experts of a checkpoint at ZeRO 1 or 2 that are spread over another number of ranks are converted in any case.
"""

import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch import nn

from depthlm.errors import UserError
from depthlm.runs.checkpoints import STATE
from depthlm.runs.manifest import CheckpointError
from depthlm.training.engine.spread_states import respread

log = logging.getLogger("depthlm")
# DeepSpeed 0.19.8 can convert optimizer states between stages of the same layout
STATE_LAYOUTS = {0: "replicated", 1: "flat", 2: "flat", 3: "sharded"}


def needs_conversion(path: Path, manifest: dict[str, Any], stage: int, world_size: int, experts: int = 1) -> bool:
    """Return whether the checkpoint must be converted. Raises UserError if DeepSpeed cannot load it at this stage.

    experts: over how many ranks they are spread now.
    """
    saved_stage = manifest["stage"]
    if STATE_LAYOUTS[saved_stage] != STATE_LAYOUTS[stage]:
        raise UserError(
            f"{path} was written at ZeRO {saved_stage}, and DeepSpeed cannot convert its optimizer to ZeRO {stage}; "
            f"resume with deepspeed=zero{saved_stage}, or start with its weights alone: init_from={path.parent.parent}"
        )
    return saved_stage > 0 and (manifest["world_size"], saved_experts(manifest)) != (world_size, experts)


def saved_experts(manifest: dict[str, Any]) -> int:
    """Return over how many ranks the experts of a checkpoint are spread."""
    # checkpoints of older versions lack the entry
    return manifest.get("experts", 1)


def convert(path: Path, folder: Path, model: nn.Module | None = None, experts: int = 1) -> Path:
    """Convert a checkpoint to DeepSpeed's universal format, in this new folder. Returns the folder.

    model: the one that will be loaded, if it has experts. experts: over how many ranks the checkpoint spreads them.
    folder: one that no earlier conversion has used: if this process is killed, the converter may still write to its own
    until its next line of output, which nobody reads.

    Raises UserError if the disk has no room for it, and CheckpointError if DeepSpeed fails.
    """
    folder.mkdir(parents=True)
    size = sum(file.stat().st_size for file in (path / STATE).iterdir())
    free = shutil.disk_usage(folder).free
    # the slices take the same space again until they are merged
    if free < 2 * size:
        raise UserError(
            f"{path}: for another layout of ranks it is converted, which needs {2 * size / 2**30:.1f} GiB "
            f"in {folder.parent}; {free / 2**30:.1f} GiB are free"
        )
    log.info("converting %s for another layout of ranks", path)
    process = subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
         "--input_folder", str(path / STATE), "--output_folder", str(folder / STATE)],
        capture_output=True, text=True, start_new_session=True,
    )  # fmt: skip
    if process.returncode:
        raise CheckpointError(f"{path}: DeepSpeed could not convert it ({process.stderr.strip()[-500:]})")
    if model is not None:
        respread(folder / STATE, model, experts)
    return folder
