"""A keyed pseudo-random permutation of 0 .. n-1 that is computed, not stored."""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_MASK = 2**64 - 1


def permute(values: NDArray[np.int64], n: int, key: int) -> NDArray[np.int64]:
    """Return the position of each value, [any shape] of 0 .. n-1, in the permutation of 0 .. n-1 given by the key.

    A Feistel network permutes a range of the next power of four; a result outside 0 .. n-1 is permuted again until it
    falls inside, which keeps the function a bijection and takes fewer than four iterations on average.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = [_mix_int(key + (turn + 1) * 0x9E3779B97F4A7C15) for turn in range(_ROUNDS)]
    placed = _feistel(values.astype(np.uint64), half, keys)
    while (outside := placed >= np.uint64(n)).any():
        placed[outside] = _feistel(placed[outside], half, keys)
    return placed.astype(np.int64)


def key_of(*numbers: int) -> int:
    """Return a 64-bit key of non-negative integers; their order matters."""
    key = 0
    for number in numbers:
        key = _mix_int(key ^ _mix_int(number + 0x9E3779B97F4A7C15))
    return key


def _feistel(values: NDArray[np.uint64], half: int, keys: list[int]) -> NDArray[np.uint64]:
    width, low = np.uint64(half), np.uint64(2**half - 1)
    left, right = values >> width, values & low
    for key in keys:
        left, right = right, left ^ (_mix(right + np.uint64(key)) & low)
    return left << width | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The finaliser of splitmix64, which relies on unsigned integers wrapping around.
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def _mix_int(x: int) -> int:
    return int(_mix(np.array([x & _MASK], dtype=np.uint64))[0])
