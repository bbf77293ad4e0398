"""Reads in two phases: what several sublayers read of old sources is read once for all of them.

Where a read's queries or weights are parameters, they are known before the read: the first sublayer of a phase reads
the sources that are there for all sublayers of the phase, and each adds what has come since when its turn comes.
(Attention Residuals, arXiv 2603.15031, section 4.2, where the blocks are its phases.)
"""

from collections.abc import Sequence
from typing import TypeVar

from depthlm.model.connections.connection import Connection

Reader = TypeVar("Reader", bound=Connection)

# reads of a phase: more of them share a pass over old sources, but leave more new sources to be read one by one
READS = 8


def phase_of(reader: Reader, readers: Sequence[Reader], length: int) -> list[Reader]:
    """The readers of its phase: `length` of them in a row, the first of all being the first of a phase."""
    begin = readers.index(reader) // length * length
    return list(readers[begin : begin + length])
