"""Warps of 32 lanes that run a kernel, with divergence and barriers."""

import numpy as np

from . import translate, values
from .ptx import Kernel, Unknown
from .values import U32, U64

END = 1 << 30
STEPS = 2_000_000


class Program:
    """A kernel whose blocks are translated when they are first needed."""

    def __init__(self, kernel: Kernel):
        self.kernel, self.functions = kernel, {}
        self.translator = translate.Translator(kernel)
        accesses = [
            i
            for b in kernel.blocks
            for i in b.instructions
            if i.name in ("ld", "st", "atom", "red") and "param" not in i.marks
        ]
        bits = [np.dtype(values.TYPES[i.type]).itemsize for i in accesses]
        self.granule = min([4, *bits, *(2 for b in kernel.blocks for i in b.instructions if "matrix" in i.name)])

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
        self.count, self.whole = len(units), len(units) == warps * len(set(self.blocks[:, 0]))
        self.registers: dict[str, np.ndarray] = {}
        self.keys = (turn * warps * 32 + self.warps * 32 + values.LANES) << 40
        x, y = grid[0], grid[1]
        special = {"%ctaid.x": self.blocks % x, "%ctaid.y": self.blocks // x % y, "%ctaid.z": self.blocks // (x * y)}
        special |= {f"%nctaid.{axis}": self.blocks * 0 + n for axis, n in zip("xyz", grid, strict=True)}
        special |= {"%tid.x": self.warps * 32 + values.LANES, "%laneid": self.warps * 0 + values.LANES}
        special["%ntid.x"] = self.blocks * 0 + warps * 32
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

    def numbers(self, given, active):
        return [self.own(np.broadcast_to(x, self.special["%tid.x"].shape), active) for x in given]

    def store(self, space, base, offset, guard, width, given, place):
        active, address, slots, keys = self.access(base, offset, guard)
        if address.size:
            self.memories[space].store(address, slots, width, self.numbers(given, active), keys, place)

    def atomic(self, base, offset, guard, operation, given, place):
        active, address, _, keys = self.access(base, offset, guard)
        numbers = self.numbers([given], active)[0]
        got = self.memory.atomic(address, operation, numbers, keys, place) if address.size else numbers
        result = np.zeros(self.special["%tid.x"].shape, given.dtype)
        result[... if active is None else active] = got.reshape(result.shape) if active is None else got
        return result

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

    def row_addresses(self, base, offset, count):
        shape = self.special["%tid.x"].shape
        address = np.broadcast_to(base, shape).astype(np.int64) + offset
        slots = np.broadcast_to(self.slots if self.rows is None else self.slots[self.rows], shape)
        keys = self.keys if self.rows is None else self.keys[self.rows]
        lanes = values.LANES[: 8 * count]
        return address[:, lanes].ravel(), slots[:, lanes].ravel(), keys[:, lanes].ravel()

    def load_matrices(self, base, offset, count, transposed, place):
        self.whole_warps(place)
        address, slots, keys = self.row_addresses(base, offset, count)
        at, _ = self.shared.index(address, slots, 16, place)
        self.shared.on_read(at, 16, keys, place)
        halves = self.shared.views[2][(at // 2)[:, None] + np.arange(8)].reshape(-1, count, 8, 8)
        halves = halves.swapaxes(2, 3) if transposed else halves
        low, high = halves[:, :, values.G, 2 * values.T], halves[:, :, values.G, 2 * values.T + 1]
        packed = values.pack(low, high)
        return [packed[:, k] for k in range(count)]

    def store_matrices(self, base, offset, given, transposed, place):
        self.whole_warps(place)
        address, slots, keys = self.row_addresses(base, offset, len(given))
        halves = np.zeros((len(given[0]), len(given), 8, 8), np.uint16)
        for k, register in enumerate(given):
            halves[:, k, values.G, 2 * values.T] = register.astype(np.uint16)
            halves[:, k, values.G, 2 * values.T + 1] = (register >> U32(16)).astype(np.uint16)
        halves = (halves.swapaxes(2, 3) if transposed else halves).reshape(-1, 8)
        self.shared.store(address, slots, 2, list(halves.T), keys, place)

    def described(self, descriptor, n, place, by_warp=False):
        """Return the tf32 factor [warps, n, 8] of `wgmma` for which a descriptor of shared memory stands.

        by_warp: each of 4 warps takes its own n rows.
        """
        self.whole_warps(place)
        shape = self.special["%tid.x"].shape
        d = np.broadcast_to(descriptor, shape)[:, :1, None].astype(np.uint64)
        start, leading, stride = ((d >> U64(shift) & U64(0x3FFF)).astype(np.int64) << 4 for shift in (0, 16, 32))
        mode = (d >> U64(62)).astype(np.int64)
        warps = self.warps if self.rows is None else self.warps[self.rows]
        row, byte = np.arange(n)[None, :, None] + warps[:, :, None] % 4 * (n * by_warp), 4 * np.arange(8)[None, None, :]
        plain = start + row // 8 * stride + row % 8 * 16 + byte // 16 * leading + byte % 16
        wide = start + row // 8 * stride + row % 8 * np.array([16, 128, 64, 32])[mode] + byte
        wide ^= (wide >> 7 & np.array([0, 7, 3, 1])[mode]) << 4
        address = np.where(mode == 0, plain, wide)
        slots, keys = (x if self.rows is None else x[self.rows] for x in (self.slots, self.keys))
        slots, keys = (np.broadcast_to(x[:, :1, None], address.shape).ravel() for x in (slots, keys))
        bits = self.shared.load(address.ravel(), slots, 4, 1, keys, place)[0].reshape(address.shape)
        return (bits & U32(0xFFFFE000)).view(np.float32).astype(np.float64)

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

    def run(self, chance=None) -> None:
        """Run until all lanes wait or have ended; with `chance`, a random generator, maybe only to another block."""
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
            if chance is not None and chance.random() < 0.3:
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
        elif last.name in ("bar", "barrier") and last.guard is None and self.whole:
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
        elif last.guard is None and last.name in ("ret", "exit"):
            self.at[lanes] = END
        elif last.guard is None and last.name in ("bar", "barrier"):
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
