"""Two-phase reads: several sublayers share one pass over the old sources.

If the queries or weights of a read are parameters, they are known before the read. So the first reader of a phase reads
all sources that exist at that time, for all readers of the phase. Each later reader adds only the sources that were
written since (Attention Residuals, arXiv 2603.15031, section 4.2, where each block is a phase).
"""

from collections.abc import Sequence
from typing import TypeVar

from depthlm.model.connections.connection import Connection

Reader = TypeVar("Reader", bound=Connection)

# reads per phase: with more reads, fewer passes over old sources, but more new sources that each read adds by itself
READS = 8


def phase_of(reader: Reader, readers: Sequence[Reader], length: int) -> list[Reader]:
    """Return the phase of a reader. Phases are runs of `length` consecutive readers; the first starts at readers[0]."""
    begin = readers.index(reader) // length * length
    return list(readers[begin : begin + length])
