"""Whether the state that would be saved, or has been loaded, is finite on all ranks."""

from depthlm.distributed.collectives import gather
from depthlm.training.engine import Engine


def lost_state(engine: Engine) -> str | None:
    """Describe a weight or a state of the optimizer that is not finite on some rank; None if all are. Collective."""
    names = gather(engine.nonfinite())
    rank = next((rank for rank, name in enumerate(names) if name is not None), None)
    if rank is None:
        return None
    return f"{names[rank]} is not finite" + (f" on rank {rank}" if len(names) > 1 else "")
