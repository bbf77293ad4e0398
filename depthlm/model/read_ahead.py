"""Reading ahead: several sublayers share one pass over the sources that exist when the first of them reads.

If the queries or weights of a read are parameters, they are known before the read. So the first reader of a phase reads
all sources that exist at that time, for all readers of the phase. Each later reader adds only the sources that were
written since (Attention Residuals, arXiv 2603.15031, section 4.2, where each block is a phase). A phase of 8 reads
loads each old source once instead of 8 times. Here a phase is READS consecutive reads, regardless of blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

# reads per phase: with more reads, fewer passes over old sources, but more new sources that each read adds by itself
READS = 8

# what a reader has read so far: first the output over some sources, then what adding more sources needs
Partial = tuple[Tensor, ...]


class ReadAhead:
    """One reader's part in a phase: the first reader begins the reads of all readers, later ones extend theirs.

    begin: reads sources for several readers; returns their partial results.
    extend: adds more sources to a partial result of this reader; returns the output.
    num_fixed: the number of this reader's sources that no later sublayer changes.
    """

    def __init__(
        self,
        reader: Any,
        begin: Callable[[Sequence[Any], Sequence[Tensor]], Sequence[Partial]],
        extend: Callable[[Any, Sequence[Tensor]], Tensor],
        num_fixed: int,
    ):
        self.reader = reader
        self.begin = begin
        self.extend = extend
        self.num_fixed = num_fixed
        self.readers = [reader]

    def link(self, connections: Sequence[Any]) -> None:
        """Find the phase of this reader. Phases are runs of consecutive readers, from the first reader on."""
        phases: list[list[Any]] = [[]]
        for reader in (c for c in connections if c.read_ahead is not None):
            # a reader with inputs for q, k and v makes three reads; counting all readers of a phase as the one with the
            # most gives fewer numbers of reads, each of which is compiled
            if (len(phases[-1]) + 1) * max(c.num_inputs for c in (*phases[-1], reader)) > READS:
                phases.append([])
            phases[-1].append(reader)
        self.readers = next(phase for phase in phases if self.reader in phase)

    def read(self, sources: Sequence[Tensor], ahead: tuple[Partial, ...]) -> tuple[Tensor, tuple[Partial, ...]]:
        """Return the output of this reader, and the partial results of the later readers of its phase.

        ahead: the partial results of this reader and of the later ones; the first reader of a phase ignores it.
        """
        first = self.readers[0].read_ahead
        if first is self:
            ahead = tuple(self.begin(self.readers, sources[: self.num_fixed]))
        partial, *later = ahead
        if recent := sources[first.num_fixed :]:
            return self.extend(partial, recent), tuple(later)
        # the sublayer saves its input, and a view would keep the outputs of the whole phase in memory
        return partial[0].clone() if later else partial[0], tuple(later)
