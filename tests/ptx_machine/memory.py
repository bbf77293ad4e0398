"""Global and shared memory with checks: bounds, alignment, numbers that nobody wrote, and races.

Every granule (the smallest access of a kernel) remembers its last writer and its last readers as a key:

    thread of the grid << 40 | barriers its block has passed << 20 | barriers its warp has passed

Two accesses of different threads, one of them a write, are in order only if a barrier of their block, or of their warp,
lies between them. Programs of a grid are never in order.
"""

import ctypes
from bisect import bisect_right

import numpy as np

from .reports import Reports, place_text
from .values import UNSIGNED

# granules of a page of shadow memory, and above how many granules there are pages, made when they are first touched
PAGE, SMALL = 12, 1 << 22
THREAD, BARRIER, EPOCH = 40, 20, (1 << 20) - 1
# instead of a key: nobody wrote there; a copy is under way
NEVER, COPYING = -1, -2


def near(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return where numbers differ by a few units of the last place at most.

    Copies of a sum may differ so much: in a sum over lanes, each fuses its own product with an addition.
    """
    return np.abs(x.astype(np.int64) - y.astype(np.int64)) <= {8: 0, 4: 8}.get(x.dtype.itemsize, 1)


class Shadow:
    """The keys of a memory of `size` granules. threads: of a block. places: of the kernel, by their number."""

    def __init__(self, size: int, threads: int, name: str, reports: Reports):
        self.threads, self.name, self.reports = threads, name, reports
        self.writer, self.reader, self.other = (np.full(size, NEVER, np.int64) for _ in range(3))
        self.wrote, self.read_at, self.other_at = (np.zeros(size, np.int32) for _ in range(3))
        self.places: dict[int, object] = {}
        self.programs: list[int] = []
        # reads that raced: their line, granule, block and epoch, and the thread that wrote
        self.raced: dict[tuple[int, int, int, int], int] = {}

    def grow(self, size: int) -> None:
        for name in ("writer", "reader", "other"):
            setattr(self, name, np.concatenate([getattr(self, name), np.full(size, NEVER, np.int64)]))
        for name in ("wrote", "read_at", "other_at"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(size, np.int32)]))

    def unordered(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        """Return where an earlier access, by its key, is not in order with a new one of another thread."""
        thread, now = old >> THREAD, new >> THREAD
        found = (old >= 0) & (thread != now)
        if not found.any():
            return found
        same_warp, same_block = thread >> 5 == now >> 5, thread // self.threads == now // self.threads
        passed = np.where(same_warp, (old & EPOCH) < (new & EPOCH), (old >> BARRIER & EPOCH) < (new >> BARRIER & EPOCH))
        return found & ~(same_block & passed)

    def thread(self, number: int) -> str:
        return f"thread {number % self.threads} of program {self.programs[number // self.threads]}"

    def report(self, kind, index, old, new, mask, place, lines, benign=False) -> None:
        k = int(np.flatnonzero(mask)[0])
        first, second = (int(x[k] >> THREAD) for x in (old, new))
        blocks = [x // self.threads for x in (first, second)]
        where = "between warps" if first >> 5 != second >> 5 else "in a warp"
        where = "between programs" if blocks[0] != blocks[1] else where
        earlier = self.places.get(int(lines[index[k]]))
        names = [self.thread(x) for x in (first, second)]
        detail = f"{names[1]} after {names[0]}" + (f" at {place_text(earlier)}" if earlier else "")
        if self.name == "global" and blocks[0] == blocks[1] and "read" in kind:
            for i in np.flatnonzero(mask):
                reader, writer, line = (old, new, lines[index[i]]) if kind.endswith("read") else (new, old, place.line)
                key = int(reader[i])
                spot = int(line), int(index[i]), (key >> THREAD) // self.threads, key >> BARRIER & EPOCH
                self.raced[spot] = int(writer[i] >> THREAD)
            return self.reports.doubt(f"race {where}, {kind} of global memory", place, detail, int(mask.sum()))
        text = f"race {where}, {kind} of {self.name} memory" + (", of the same value" if benign else "")
        (self.reports.note if benign else self.reports.fault)(text, place, detail, int(mask.sum()))

    def on_read(self, index, keys, place) -> None:
        """index: a granule of each access. keys: of the threads."""
        self.places[place.line] = place
        written = self.writer[index]
        conflict = self.unordered(written, keys)
        if conflict.any():
            self.report("read after write", index, written, keys, conflict, place, self.wrote)
        before = self.reader[index]
        # the other slot keeps a reader of another block or, in vain of that, of another warp
        elsewhere = (before != NEVER) & (before >> THREAD + 5 != keys >> THREAD + 5)
        if elsewhere.any():
            at, old, block = index[elsewhere], before[elsewhere], (keys[elsewhere] >> THREAD) // self.threads
            kept = self.other[at]
            foreign = (
                (kept != NEVER)
                & ((kept >> THREAD) // self.threads != block)
                & ((old >> THREAD) // self.threads == block)
            )
            self.other[at] = np.where(foreign, kept, old)
            self.other_at[at] = np.where(foreign, self.other_at[at], self.read_at[at])
        self.reader[index], self.read_at[index] = keys, place.line
        lost = self.reader[index]
        lost = lost >> THREAD + 5 != keys >> THREAD + 5
        if lost.any():
            self.other[index[lost]], self.other_at[index[lost]] = keys[lost], place.line

    def on_write(self, index, keys, place, same) -> None:
        """same: a function that returns where the written number is what was there, or (True) nearly what is there."""
        self.places[place.line] = place
        for kind, slots, lines in (
            ("write after write", self.writer, self.wrote),
            ("write after read", self.reader, self.read_at),
            ("write after read", self.other, self.other_at),
        ):
            old = slots[index]
            conflict = self.unordered(old, keys)
            if conflict.any():
                self.report_writes(kind, index, old, keys, conflict, place, lines, same())
        self.writer[index], self.wrote[index] = keys, place.line
        # several threads in one instruction
        lost = self.writer[index]
        conflict = self.unordered(lost, keys) if index.size > 1 else np.zeros(1, bool)
        if conflict.any():
            self.report_writes("write after write", index, lost, keys, conflict, place, self.wrote, same(True))

    def report_writes(self, kind, index, old, keys, conflict, place, lines, equal) -> None:
        for mask, benign in ((conflict & ~equal, False), (conflict & equal, True)):
            if mask.any():
                self.report(kind, index, old, keys, mask, place, lines, benign)


def write(view, at, numbers, granules: int):
    """Write consecutive numbers of each access; return what was there, and `same` as `Shadow.on_write` takes it.

    granules: of an access.
    """
    before = [view[at + k] for k in range(len(numbers))]
    for k, x in enumerate(numbers):
        view[at + k] = x

    def same(after=False):
        there = [near(view[at + k], x) for k, x in enumerate(numbers)] if after else map(np.equal, before, numbers)
        return np.repeat(np.all(list(there), axis=0), granules)

    return before, same


class GlobalMemory:
    """The memory of this process, of which kernels may use `ranges`: pairs of addresses."""

    def __init__(self, ranges, granule: int, threads: int, reports: Reports, spoiled=None):
        """spoiled: reads that return numbers without sense (`Shadow.raced` of an earlier run)."""
        self.spoiled, self.spoiled_lines = spoiled or {}, {line for line, *_ in spoiled or ()}
        merged: list[list[int]] = []
        for start, end in sorted(ranges):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            elif end > start:
                merged.append([start, end])
        self.starts, self.ends = ([r[k] for r in merged] for k in (0, 1))
        self.base = (self.starts[0] if merged else 64) & ~63
        size = ((self.ends[-1] if merged else 128) - self.base + 63) & ~63
        whole = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.base))
        self.views = {width: whole.view(UNSIGNED[8 * width]) for width in (1, 2, 4, 8)}
        self.granule, self.reports = granule, reports
        # what was where, before each store
        self.log: list[tuple[int, np.ndarray, np.ndarray]] = []
        self.offsets, total = [], 0
        for start, end in merged:
            self.offsets.append(total - start // granule)
            total += end // granule - start // granule + 2
        self.arrays = [np.array(x, np.int64) for x in (self.starts, self.ends, self.offsets)]
        self.pages = None if total <= SMALL else np.full((total >> PAGE) + 1, NEVER, np.int64)
        self.shadow = Shadow(total if self.pages is None else 0, threads, "global", reports)

    def undo(self) -> None:
        """Take back all that was written."""
        for width, at, old in reversed(self.log):
            self.views[width][at] = old

    def written(self) -> list[np.ndarray]:
        """Return what is now wherever something was written."""
        return [self.views[width][at] for width, at, _ in self.log]

    def redo(self, contents: list[np.ndarray]) -> None:
        for (width, at, _), new in zip(self.log, contents, strict=True):
            self.views[width][at] = new

    def locate(self, address, size, place, keys):
        """Return the accesses that are allowed (None: all), and an offset of their granules."""
        crooked = address % size != 0
        if crooked.any():
            self.reports.fault(
                "misaligned access", place, f"{size} bytes at address {int(address[crooked][0]):#x}", int(crooked.sum())
            )
        low, high = int(address.min()), int(address.max()) + size
        k = bisect_right(self.starts, low) - 1
        if k >= 0 and high <= self.ends[k] and not crooked.any():
            return None, self.offsets[k]
        starts, ends, offsets = self.arrays
        k = np.searchsorted(starts, address, "right") - 1
        inside = (k >= 0) & (address + size <= ends[k])
        if not inside.all():
            first = int(np.flatnonzero(~inside)[0])
            near = int(k[first])
            where = f"{int(address[first] - self.ends[near])} bytes after the end of a tensor"
            if near < 0:
                where = "before all tensors"
            elif address[first] < self.ends[near]:
                where = "its last bytes are after the end of a tensor"
            detail = f"{self.shadow.thread(int(keys[first] >> THREAD))}, {size} bytes, {where}"
            self.reports.fault("out of bounds", place, detail, int((~inside).sum()))
        return inside & ~crooked, offsets[k]

    def granules(self, address, size, offset):
        """Return [accesses, granules of each] of the shadow memory."""
        index = (address // self.granule + offset)[:, None]
        if size > self.granule:
            index = index + np.arange(size // self.granule)
        if self.pages is None:
            return index
        page = index >> PAGE
        new = np.unique(page[self.pages[page] == NEVER])
        if new.size:
            self.pages[new] = (len(self.shadow.writer) >> PAGE) + np.arange(new.size)
            self.shadow.grow(new.size << PAGE)
        return self.pages[page] << PAGE | index & (1 << PAGE) - 1

    def load(self, address, _, width, count, keys, place):
        """Return arrays of unsigned integers; those out of bounds have all bits set."""
        size = width * count
        allowed, offset = self.locate(address, size, place, keys)
        kept, used = (address, keys) if allowed is None else (address[allowed], keys[allowed])
        if allowed is not None:
            offset = offset[allowed]
        index = self.granules(kept, size, offset)
        self.shadow.on_read(index.ravel(), np.repeat(used, index.shape[1]), place)
        at = (kept - self.base) // width
        got = [self.views[width][at + k] for k in range(count)]
        if place.line in self.spoiled_lines:
            for i, key in enumerate(used):
                thread, epoch = int(key) >> THREAD, int(key) >> BARRIER & EPOCH
                for j in index[i]:
                    writer = self.spoiled.get((place.line, int(j), thread // self.shadow.threads, epoch), thread)
                    if writer != thread:
                        for part in got:
                            part[i] = np.iinfo(part.dtype).max
        if allowed is None:
            return got
        result = [np.full(address.shape, np.iinfo(x.dtype).max, x.dtype) for x in got]
        for whole, part in zip(result, got, strict=True):
            whole[allowed] = part
        return result

    def store(self, address, _, width, numbers, keys, place):
        size = width * len(numbers)
        allowed, offset = self.locate(address, size, place, keys)
        if allowed is not None:
            address, keys, offset = address[allowed], keys[allowed], offset[allowed]
            numbers = [x[allowed] for x in numbers]
        at, index = (address - self.base) // width, self.granules(address, size, offset)
        before, same = write(self.views[width], at, numbers, index.shape[1])
        self.log += [(width, at + k, old) for k, old in enumerate(before)]
        self.shadow.on_write(index.ravel(), np.repeat(keys, index.shape[1]), place, same)


class SharedMemory:
    """The shared memories, of `size` bytes each, of blocks that run at the same time. At first all bits are set."""

    def __init__(self, blocks: int, size: int, granule: int, threads: int, reports: Reports):
        self.size, self.granule, self.reports = size, granule, reports
        self.stride = -(-size // 64) * 64 + 64
        whole = np.full(blocks * self.stride, 255, np.uint8)
        self.views = {width: whole.view(UNSIGNED[8 * width]) for width in (1, 2, 4, 8)}
        self.shadow = Shadow(len(whole) // granule, threads, "shared", reports)

    def index(self, address, slot, size, place):
        """Return the place of each access in `views[1]`, and which ones are allowed."""
        address = address.astype(np.int64)
        inside = (address + size <= self.size) & (address % size == 0)
        if not inside.all():
            worst = int(address[~inside][0])
            kind = "out of bounds" if worst + size > self.size else "misaligned access"
            self.reports.fault(
                f"{kind} of shared memory", place, f"{size} bytes at {worst} of {self.size}", int((~inside).sum())
            )
        return np.where(inside, address, self.size + (-self.size) % 16) + slot * self.stride, inside

    def granules(self, at, size):
        return (at // self.granule)[:, None] + np.arange(max(1, size // self.granule))

    def on_read(self, at, size, keys, place):
        index = self.granules(at, size)
        keys = np.repeat(keys, index.shape[1])
        written = self.shadow.writer[index]
        if (written == COPYING).any():
            self.reports.fault("read of shared memory before its copy has arrived", place)
        empty = int((written == NEVER).sum())
        if empty:
            self.reports.note("read of shared memory that nobody wrote", place, "", empty)
        self.shadow.on_read(index.ravel(), keys, place)

    def load(self, address, slot, width, count, keys, place):
        at, _ = self.index(address, slot, width * count, place)
        self.on_read(at, width * count, keys, place)
        return [self.views[width][at // width + k] for k in range(count)]

    def store(self, address, slot, width, numbers, keys, place):
        at, _ = self.index(address, slot, width * len(numbers), place)
        index = self.granules(at, width * len(numbers))
        _, same = write(self.views[width], at // width, numbers, index.shape[1])
        self.shadow.on_write(index.ravel(), np.repeat(keys, index.shape[1]), place, same)

    def mark(self, at, size, keys, place):
        """A copy into shared memory begins or ends there."""
        index = self.granules(at, size)
        never = lambda after=False: np.zeros(index.size, bool)  # noqa: E731
        self.shadow.on_write(index.ravel(), np.repeat(keys, index.shape[1]), place, never)

    def forget(self, at, size):
        """Set all bits of what a copy will overwrite."""
        for k in range(size):
            self.views[1][at + k] = 255
        self.shadow.writer[self.granules(at, size)] = COPYING
