"""Runs the programs of a grid, many at once, whose warps take their steps together."""

import numpy as np

from .machine import Group
from .memory import GlobalMemory, SharedMemory
from .reports import Reports

# lanes that run at once
TOGETHER = 2048
MOST_THREADS = 1 << 22


def launch(program, grid, parameters, ranges, shared_bytes, warps, reports: Reports, edges=False) -> None:
    """Run all programs of a grid. parameters: bytes by name. ranges: addresses that may be used. edges: see `programs`.

    If reads of global memory race with writes, the programs run again with other numbers in place of what was read: if
    all memory is the same in the end, then nothing depends on these reads, as where several threads hold copies of the
    same values and only one of them stores.
    """
    grid = (*grid, 1, 1)[:3]
    arguments = program, grid, programs(grid, edges), parameters, shared_bytes, warps
    memory = GlobalMemory(ranges, program.granule, warps * 32, reports)
    run_grid(*arguments, memory, reports)
    if raced := memory.shadow.raced:
        again = GlobalMemory(ranges, program.granule, warps * 32, Reports(), raced)
        results = memory.written()
        memory.undo()
        run_grid(*arguments, again, Reports())
        same = all(np.array_equal(x, y) for x, y in zip(results, memory.written(), strict=True))
        others = again.written()
        again.undo()
        memory.redo(results)
        reports.settle(same and all(np.array_equal(x, y) for x, y in zip(others, again.written(), strict=True)))


def programs(grid, edges: bool) -> list[int]:
    """Return the numbers of the programs to run; edges: at most the first and the last of a long axis."""
    x, y, z = (range(n) if n <= 64 or not edges else (0, *range(n - 32, n)) for n in grid)
    return [i + grid[0] * (j + grid[1] * k) for k in z for j in y for i in x]


def run_grid(program, grid, blocks, parameters, size, warps, memory, reports) -> None:
    if len(blocks) * warps * 32 >= MOST_THREADS:
        raise ValueError(f"{len(blocks)} programs are too many")
    each = max(1, TOGETHER // (32 * warps))
    # threads are numbered by the place of their program
    memory.shadow.programs = blocks
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), each):
            batch = blocks[start : start + each]
            shared = SharedMemory(len(batch), size, program.granule, warps * 32, reports)
            shared.shadow.programs = blocks
            units = [(slot, start + slot, block, warp) for slot, block in enumerate(batch) for warp in range(warps)]
            group = Group(program, units, grid, parameters, memory, shared, reports, warps)
            group.run()
            while group.waiting.any():
                open_barriers(group, reports)
                group.run()


def open_barriers(group: Group, reports: Reports) -> None:
    """Let each block go on in which all lanes that have not ended wait for a barrier."""
    for block in np.unique(group.blocks):
        rows = np.flatnonzero(group.blocks[:, 0] == block)
        places = np.unique(group.at[rows][group.waiting[rows]])
        if len(places) > 1:
            last = [group.program.kernel.blocks[p - 1].last for p in places]
            reports.fault("threads of a block wait at different barriers", last[0], f"and {last[1].source}")
        if len(places):
            group.release(rows)
