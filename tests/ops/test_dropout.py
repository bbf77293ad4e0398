"""The masks of dropout: random, and a function of the seeds alone."""

import pytest
import torch

from depthlm.ops.dropout import Dropout, apply_dropout, draw_mask, hash_bits


def lowbias32(x: int) -> int:
    """The published hash, in unsigned integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_the_hash_is_lowbias32():
    numbers = [0, 1, 2, 12345, 2**31 - 1, 2**31, 2**32 - 1]
    signed = torch.tensor([n - 2**32 if n >= 2**31 else n for n in numbers], dtype=torch.int32)
    assert [n % 2**32 for n in hash_bits(signed).tolist()] == [lowbias32(n) for n in numbers]


def make(rate: float, rows: int = 64) -> Dropout:
    return Dropout(rate, torch.arange(rows, dtype=torch.int32) * 7919)


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_values_are_kept_with_the_given_probability_independently_of_one_another(rate):
    how, shape = make(rate), torch.Size((64, 32, 48))
    masks = torch.stack([draw_mask(shape, how.at(place)).double() for place in range(4)])
    n = masks[0].numel()
    deviation = (rate * (1 - rate)) ** 0.5
    assert ((masks.mean((1, 2, 3)) - (1 - rate)).abs() < 4 * deviation / n**0.5).all()
    z = (masks - (1 - rate)) / deviation
    pairs = {
        "rows": z[:, 1:] * z[:, :-1],
        "tokens": z[:, :, 1:] * z[:, :, :-1],
        "channels": z[..., 1:] * z[..., :-1],
        "places": z[1:] * z[:-1],
    }
    for name, products in pairs.items():
        assert abs(products.mean()) < 4 / products.numel() ** 0.5, name


def test_values_are_scaled_so_that_their_mean_stays():
    x = torch.rand(64, 100, 100) + 1
    y = apply_dropout(x, make(0.25), 0)
    assert torch.equal(y[y != 0], (x / 0.75)[y != 0])
    assert y.mean().item() == pytest.approx(x.mean().item(), rel=2e-3)
    assert apply_dropout(x, None, 0) is x
