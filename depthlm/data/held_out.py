"""Which documents are held out for validation: a hash of the name decides, so a document never changes its split."""

import math
from collections.abc import Iterable
from hashlib import blake2b


def is_validation(name: str, fraction: float) -> bool:
    """Return whether the document of this name is held out: true for a share `fraction` of all names."""
    return fraction >= 1 or (fraction > 0 and share(name) < fraction)


def held_out_share(names: Iterable[str], fraction: float) -> float:
    """Return the fraction, raised where needed so that at least one document with these names is held out."""
    lowest = 1.0
    for name in names:
        lowest = min(lowest, share(name))
        if lowest < fraction:
            return fraction
    return math.nextafter(lowest, 1.0)


def share(name: str) -> float:
    """Return a hash of the name, uniform in [0, 1)."""
    # A float holds 53 bits: more could round up to 1.
    return (int.from_bytes(blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()) >> 11) / 2**53
