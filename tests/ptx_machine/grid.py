"""Runs the programs of a grid in a chosen order, with barriers that blocks of several groups of warps pass."""

import random
from collections import deque

import numpy as np

from .machine import END, Group
from .memory import GlobalMemory, SharedMemory
from .reports import Reports

# lanes that run at once, where warps run together
TOGETHER = 2048
MOST_THREADS = 1 << 22
ORDERS = ("together", "first", "last", "random")


def launch(program, grid, parameters, ranges, shared_bytes, warps, reports: Reports, order="together", seed=0,
           edges=False) -> None:  # fmt: skip
    """Run all programs of a grid. parameters: bytes by name. ranges: addresses that may be used. edges: see `programs`.

    If reads of global memory race with writes, the programs run again with other numbers in place of what was read: if
    all memory is the same in the end, then nothing depends on these reads, as where several threads hold copies of the
    same values and only one of them stores.
    """
    grid = (*grid, 1, 1)[:3]
    arguments = program, grid, programs(grid, edges), parameters, shared_bytes, warps
    memory = GlobalMemory(ranges, program.granule, warps * 32, reports)
    run_grid(*arguments, memory, reports, order, seed)
    if raced := memory.shadow.raced:
        again = GlobalMemory(ranges, program.granule, warps * 32, Reports(), raced)
        results = memory.written()
        memory.undo()
        run_grid(*arguments, again, Reports(), order, seed)
        same = all(np.array_equal(x, y) for x, y in zip(results, memory.written(), strict=True))
        others = again.written()
        again.undo()
        memory.redo(results)
        reports.settle(same and all(np.array_equal(x, y) for x, y in zip(others, again.written(), strict=True)))


def programs(grid, edges: bool) -> list[int]:
    """Return the numbers of the programs to run; edges: at most the first and the last of a long axis."""
    x, y, z = (range(n) if n <= 64 or not edges else (0, *range(n - 32, n)) for n in grid)
    return [i + grid[0] * (j + grid[1] * k) for k in z for j in y for i in x]


def run_grid(program, grid, blocks, parameters, size, warps, memory, reports, order, seed) -> None:
    blocks, chance = list(blocks), random.Random(seed)
    if len(blocks) * warps * 32 >= MOST_THREADS:
        raise ValueError(f"{len(blocks)} programs are too many")
    each = max(1, TOGETHER // (32 * warps)) if order == "together" else 1
    if order == "last":
        blocks.reverse()
    elif order == "random":
        chance.shuffle(blocks)
    # threads are numbered by the turn of their program
    memory.shadow.programs = blocks
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), each):
            batch = blocks[start : start + each]
            shared = SharedMemory(len(batch), size, program.granule, warps * 32, reports)
            shared.shadow.programs = blocks
            units = [(slot, start + slot, block, warp) for slot, block in enumerate(batch) for warp in range(warps)]
            parts = [units] if order == "together" else [[unit] for unit in units]
            groups = [Group(program, part, grid, parameters, memory, shared, reports, warps) for part in parts]
            run_groups(groups[::-1] if order == "last" else groups, chance if order == "random" else None, reports)


def run_groups(groups: list[Group], chance, reports: Reports) -> None:
    ready = deque(groups)
    while ready:
        if chance is not None:
            ready.rotate(chance.randrange(len(ready)))
        group = ready.popleft()
        group.run(chance)
        blocked = group.together is None and bool((group.waiting | (group.at == END)).all())
        if not blocked:
            ready.append(group)
        if ready:
            continue
        # a barrier opens for a block when all of its lanes that have not ended wait
        for block in sorted({int(b) for g in groups for b in g.blocks[:, 0]}):
            own = [(g, np.flatnonzero(g.blocks[:, 0] == block)) for g in groups]
            waiting = [g.waiting[rows] for g, rows in own]
            if any(w.any() for w in waiting):
                places = {int(x) for g, rows in own for x in g.at[rows][g.waiting[rows]]}
                if len(places) > 1:
                    last = [groups[0].program.kernel.blocks[p - 1].last for p in sorted(places)]
                    reports.fault("threads of a block wait at different barriers", last[0], f"and {last[1].source}")
                for g, rows in own:
                    if g.waiting[rows].any():
                        g.release(rows)
        ready.extend(g for g in groups if g.together is not None or bool((~g.waiting & (g.at < END)).any()))
