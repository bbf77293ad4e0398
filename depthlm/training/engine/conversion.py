"""Which checkpoints of another number of ranks, or another ZeRO stage, can be loaded.

    saved -> loaded stage  same number of ranks  another number of ranks
    0 -> 0                 by DeepSpeed          by DeepSpeed
    1, 2 -> 1, 2           by DeepSpeed          by `load_repartitioned`
    3 -> 3                 by DeepSpeed          by `load_repartitioned`
    any other              refused               refused

The experts of a checkpoint at ZeRO 1 or 2 that are spread over another number of ranks are repartitioned in any case.
"""

from pathlib import Path
from typing import Any

from depthlm.errors import UserError

# optimizer states can be loaded at stages of the same layout
STATE_LAYOUTS = {0: "replicated", 1: "flat", 2: "flat", 3: "sharded"}


def needs_repartition(path: Path, manifest: dict[str, Any], stage: int, world_size: int, experts: int = 1) -> bool:
    """Return whether the checkpoint must be repartitioned. Raises UserError if it cannot be loaded at this stage.

    experts: over how many ranks they are spread now.
    """
    saved_stage = manifest["stage"]
    if STATE_LAYOUTS[saved_stage] != STATE_LAYOUTS[stage]:
        raise UserError(
            f"{path} was written at ZeRO {saved_stage}, and its optimizer cannot be converted to ZeRO {stage}; "
            f"resume with deepspeed=zero{saved_stage}, or start with its weights alone: init_from={path.parent.parent}"
        )
    return saved_stage > 0 and (manifest["world_size"], saved_experts(manifest)) != (world_size, experts)


def saved_experts(manifest: dict[str, Any]) -> int:
    """Return over how many ranks the experts of a checkpoint are spread."""
    # checkpoints of older versions lack the entry
    return manifest.get("experts", 1)
