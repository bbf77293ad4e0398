"""The maps of hyper-connections in cpu.py equal their definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlm.ops.hyper_connections import cpu, naive

from ..inputs import normal


@settings(max_examples=10)
@given(n=st.integers(1, 4), t=st.integers(1, 4), d=st.integers(1, 5))
@pytest.mark.parametrize("dynamic", [True, False])
def test_maps(dynamic: bool, n: int, t: int, d: int) -> None:
    x, static = normal(2, t, n, d), [normal(*shape, seed=1) for shape in ((n,), (n,), (n, n))]
    weights = [normal(n + 2, d, seed=2), normal(2, seed=3)] if dynamic else []
    results = [
        module.hyper_maps(x, tuple(static), tuple(weights) if dynamic else None, 1e-5) for module in (cpu, naive)
    ]
    torch.testing.assert_close(*results)
    inputs = [*static, *([x, *weights] if dynamic else [])]
    along = [normal(*maps.shape, seed=4).detach() for maps in results[0]]
    torch.testing.assert_close(*(torch.autograd.grad(maps, inputs, along) for maps in results))
