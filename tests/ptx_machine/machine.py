"""Warps of 32 lanes that run a kernel, with divergence and barriers."""

import numpy as np

from . import translate, values
from .ptx import Kernel, Unknown
from .values import U32

END = 1 << 30
STEPS = 2_000_000


class Program:
    """A kernel whose blocks are translated when they are first needed."""

    def __init__(self, kernel: Kernel):
        self.kernel, self.functions = kernel, {}
        self.translator = translate.Translator(kernel)
        marks = ((i.name, i.marks) for b in kernel.blocks for i in b.instructions)
        accesses = [values.TYPES[of[-1]] for name, of in marks if name in ("ld", "st") and "param" not in of]
        sizes = [np.dtype(x).itemsize for x in accesses]
        self.granule = min([4, *sizes, *(2 for b in kernel.blocks for i in b.instructions if i.name == "ldmatrix")])

    def block(self, index: int):
        if index not in self.functions:
            block = self.kernel.blocks[index]
            self.functions[index] = (*self.translator.function(block), block.last)
        return self.functions[index]


class Group:
    """Warps that run in step, each with 32 lanes. Blocks of instructions call its methods as those of X."""

    def __init__(self, program, units, grid, parameters, memory, shared, reports, warps):
        self.program, self.memory, self.shared, self.reports, self.values = program, memory, shared, reports, parameters
        self.memories = {"global": memory, "shared": shared}
        parts = (np.array(x, np.int64)[:, None] for x in zip(*units, strict=True))
        self.slots, turn, self.blocks, self.warps = parts
        self.count = len(units)
        self.registers: dict[str, np.ndarray] = {}
        self.keys = (turn * warps * 32 + self.warps * 32 + values.LANES) << 40
        x, y = grid[0], grid[1]
        special = {"%ctaid.x": self.blocks % x, "%ctaid.y": self.blocks // x % y, "%ctaid.z": self.blocks // (x * y)}
        special |= {"%nctaid.x": self.blocks * 0 + x, "%tid.x": self.warps * 32 + values.LANES}
        shape = (self.count, 32)
        self.all_special = {name: np.broadcast_to(x, shape).astype(U32) for name, x in special.items()}
        self.together: int | None = 0  # the place of all lanes, if it is the same, and none waits or has ended
        self.at, self.waiting = np.zeros(shape, np.int64), np.zeros(shape, bool)
        self.copies: list[dict] = []
        self.committed = np.zeros(self.count, np.int64)
        self.steps = 0

    # what the functions of blocks use

    def full(self, number):
        return np.full((len(self.special["%tid.x"]), 32), number)

    def parameter(self, name, offset, dtype):
        data = self.values[name]
        return np.frombuffer(data.ljust(offset + 8, b"\0"), dtype, 1, offset)[0]

    def active(self, guard):
        """Return the lanes that take part, or None: all."""
        if guard is None:
            return self.mask
        active = guard if self.mask is None else guard & self.mask
        return None if active.all() else np.broadcast_to(active, self.special["%tid.x"].shape)

    def own(self, x, active):
        return x.ravel() if active is None else x[active]

    def access(self, base, offset, guard):
        """Return the lanes that take part, their addresses, their slots and their keys."""
        active = self.active(guard)
        shape = self.special["%tid.x"].shape
        address = np.broadcast_to(base, shape).astype(np.int64) + offset
        rows = self.rows
        keys = self.keys if rows is None else self.keys[rows]
        slots = np.broadcast_to(self.slots if rows is None else self.slots[rows], shape)
        return active, self.own(address, active), self.own(slots, active), self.own(keys, active)

    def spread(self, parts, active, width):
        """Return arrays [warps, 32] from the numbers of the lanes that take part."""
        shape, result = self.special["%tid.x"].shape, []
        for part in parts:
            if active is None:
                result.append(part.reshape(shape))
            else:
                whole = np.zeros(shape, values.UNSIGNED[8 * width])
                whole[active] = part
                result.append(whole)
        return result

    def load(self, space, base, offset, guard, width, count, place):
        active, address, slots, keys = self.access(base, offset, guard)
        got = [np.zeros(0, U32)] * count
        if address.size:
            got = self.memories[space].load(address, slots, width, count, keys, place)
        return self.spread(got, active, width)

    def store(self, space, base, offset, guard, width, given, place):
        active, address, slots, keys = self.access(base, offset, guard)
        if address.size:
            numbers = [self.own(np.broadcast_to(x, self.special["%tid.x"].shape), active) for x in given]
            self.memories[space].store(address, slots, width, numbers, keys, place)

    def copy_async(self, to, to_offset, origin, offset, guard, size, used, place):
        """The copy arrives as late as the hardware may let it: when a thread waits. Until then nobody may read it."""
        active, target, slots, keys = self.access(to, to_offset, guard)
        _, source, _, _ = self.access(origin, offset, guard)
        if not target.size:
            return
        rows = np.arange(self.count) if self.rows is None else self.rows
        shape = self.special["%tid.x"].shape
        row = self.own(np.broadcast_to(rows[:, None], shape), active)
        lane = self.own(np.broadcast_to(values.LANES, shape), active)
        used = (
            np.full(len(target), size)
            if used is None
            else self.own(np.broadcast_to(used, shape), active).astype(np.int64)
        )
        at, inside = self.shared.index(target, slots, size, place)
        self.shared.mark(at, size, keys, place)
        self.shared.forget(at, size)
        parts = {"row": row, "lane": lane, "at": at, "source": source, "used": used, "group": self.committed[row]}
        parts["early"] = self.fetch(source, used, size, keys, place)
        parts = {name: x[inside] for name, x in parts.items()}
        self.copies.append(parts | {"size": size, "place": place})

    def commit_copies(self):
        self.committed[... if self.rows is None else self.rows] += 1

    def wait_copies(self, left, place):
        rows = np.arange(self.count) if self.rows is None else self.rows
        kept = []
        for copy in self.copies:
            done = np.isin(copy["row"], rows) & (copy["group"] < self.committed[copy["row"]] - left)
            if done.any():
                self.arrive({name: x[done] if isinstance(x, np.ndarray) else x for name, x in copy.items()})
            if not done.all():
                kept.append({name: x[~done] if isinstance(x, np.ndarray) else x for name, x in copy.items()})
        self.copies = kept

    def fetch(self, source, used, size, keys, place):
        """Return [copies, size] bytes, of which only the first `used` are read, and the others are 0."""
        data = np.zeros((len(source), size), np.uint8)
        for amount in np.unique(used[used > 0]):
            chosen = used == amount
            width = next(w for w in (4, 2, 1) if amount % w == 0)
            got = self.memory.load(source[chosen], None, width, int(amount) // width, keys[chosen], place)
            data[chosen, :amount] = np.stack(got, 1).view(np.uint8)
        return data

    def arrive(self, copy):
        size, place, at = copy["size"], copy["place"], copy["at"]
        keys = self.keys[copy["row"], copy["lane"]]
        data = self.fetch(copy["source"], copy["used"], size, keys, place)
        if (data != copy["early"]).any():
            self.reports.fault("what is copied changes before the copy has arrived", place)
        self.shared.views[1][at[:, None] + np.arange(size)] = data
        self.shared.mark(at, size, keys, place)

    def load_matrices(self, base, offset, count, transposed, place):
        self.whole_warps(place)
        shape = self.special["%tid.x"].shape
        address = np.broadcast_to(base, shape).astype(np.int64) + offset
        rows = slice(None) if self.rows is None else self.rows
        slots, lanes = np.broadcast_to(self.slots[rows], shape), values.LANES[: 8 * count]
        address, slots, keys = (x[:, lanes].ravel() for x in (address, slots, self.keys[rows]))
        at, _ = self.shared.index(address, slots, 16, place)
        self.shared.on_read(at, 16, keys, place)
        halves = self.shared.views[2][(at // 2)[:, None] + np.arange(8)].reshape(-1, count, 8, 8)
        halves = halves.swapaxes(2, 3) if transposed else halves
        low, high = halves[:, :, values.G, 2 * values.T], halves[:, :, values.G, 2 * values.T + 1]
        packed = values.pack(low, high)
        return [packed[:, k] for k in range(count)]

    def shuffled(self, lane, guard, place):
        active = self.active(guard)
        if active is not None:
            from_idle = active & ~np.take_along_axis(active, lane, 1)
            if from_idle.any():
                self.reports.fault("shuffle from a lane that does not take part", place)

    def whole_warps(self, place):
        if self.mask is not None:
            self.reports.fault("not all lanes of a warp take part", place)

    def sync_warps(self):
        self.keys[... if self.rows is None else self.rows] += 1

    # control

    def run(self) -> None:
        """Run until all lanes wait or have ended."""
        while True:
            self.steps += 1
            if self.steps > STEPS:
                raise RuntimeError(f"{self.program.kernel.name} does not end after {STEPS} blocks of instructions")
            if self.together is not None:
                index, self.rows, self.mask, self.special = self.together, None, None, self.all_special
            else:
                ready = ~self.waiting & (self.at < END)
                if not ready.any():
                    return
                index = int(self.at[ready].min())
                lanes = ready & (self.at == index)
                self.rows = np.flatnonzero(lanes.any(1))
                self.mask = lanes[self.rows]
                self.mask = None if self.mask.all() else self.mask
                self.special = {name: x[self.rows] for name, x in self.all_special.items()}
            last = self.execute(index)
            if (self.finish if self.together is None else self.continue_)(index, last):
                return

    def execute(self, index):
        read, written, function, last = self.program.block(index)
        registers, rows, mask = self.registers, self.rows, self.mask
        given = [self.value(name) if rows is None else self.value(name)[rows] for name in read]
        for name, x in zip(written, function(self, *given), strict=True):
            if x.ndim == 0:
                x = self.full(x)
            if rows is not None or mask is not None:
                whole = self.value(name).copy()
                place = slice(None) if rows is None else rows
                whole[place] = x if mask is None else np.where(mask, x, whole[place])
                x = whole
            registers[name] = x
        return last

    def value(self, name):
        if name not in self.registers:
            dtype = values.UNSIGNED[self.program.kernel.widths[name]]
            self.registers[name] = np.zeros((self.count, 32), dtype)
        return self.registers[name]

    def target(self, last):
        return self.program.kernel.labels[last.operands[0]]

    def continue_(self, index, last) -> bool:
        """Move all lanes. Return whether they have to stop."""
        if last is None:
            self.together = index + 1
            return False
        if last.name == "bra":
            taken = None if last.guard is None else self.value(last.guard[0]) == last.guard[1]
            if taken is None or taken.all() or not taken.any():
                self.together = self.target(last) if taken is None or taken.all() else index + 1
                return False
        elif last.name == "bar" and last.guard is None:
            self.keys += (1 << 20) + 1
            self.together = index + 1
            return False
        self.together = None
        return self.finish(index, last)

    def finish(self, index, last) -> bool:
        """Move the lanes that ran. Return whether all have to stop."""
        lanes = np.zeros_like(self.waiting)
        lanes[self.rows] = True if self.mask is None else self.mask
        if last is None:
            self.at[lanes] = index + 1
        elif last.name == "bra":
            taken = lanes if last.guard is None else lanes & (self.value(last.guard[0]) == last.guard[1])
            self.at[lanes] = index + 1
            self.at[taken] = self.target(last)
        elif last.guard is None and last.name == "ret":
            self.at[lanes] = END
        elif last.guard is None and last.name == "bar":
            self.at[lanes], self.waiting[lanes] = index + 1, True
        else:
            raise Unknown(f"line {last.line}: {last.text}")
        self.gather()
        return bool((self.waiting | (self.at == END)).all())

    def gather(self) -> None:
        first = int(self.at.flat[0])
        if first != END and not self.waiting.any() and (self.at == first).all():
            self.together = first

    def release(self, rows) -> None:
        """Lanes of these warps have passed a barrier."""
        self.keys[rows] += (1 << 20) + 1
        self.waiting[rows] = False
        self.gather()
