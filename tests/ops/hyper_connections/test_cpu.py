"""The maps of hyper-connections in cpu.py equal their definition."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlm.ops.hyper_connections import cpu, naive

from ..inputs import normal


@settings(max_examples=12)
@given(n=st.integers(1, 4), t=st.integers(1, 4), d=st.integers(1, 5), dynamic=st.booleans())
def test_maps(n: int, t: int, d: int, dynamic: bool) -> None:
    x, static = normal(2, t, n, d), tuple(normal(*shape, seed=1) for shape in ((n,), (n,), (n, n)))
    weights = (normal(n + 2, d, seed=2), normal(2, seed=3)) if dynamic else None
    results = [module.hyper_maps(x, static, weights, 1e-5) for module in (cpu, naive)]
    torch.testing.assert_close(*results)
    inputs = [*static, *([x, *weights] if weights else [])]
    along = [normal(*maps.shape, seed=4).detach() for maps in results[0]]
    torch.testing.assert_close(*(torch.autograd.grad(maps, inputs, along) for maps in results))
