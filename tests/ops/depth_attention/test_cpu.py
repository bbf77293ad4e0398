"""The value mix over depth equals its definition, and its gradients equal numerical derivatives."""

from inspect import unwrap

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlm.ops.depth_attention import naive
from depthlm.ops.depth_attention.cpu import depth_weights
from depthlm.ops.depth_attention.naive import depth_value_mix

from ..inputs import normal


def mixed(q: torch.Tensor, *entries: torch.Tensor) -> torch.Tensor:
    return depth_value_mix(q, entries[: len(entries) // 2], entries[len(entries) // 2 :])


@settings(max_examples=10)
@given(
    n=st.integers(1, 4), kv_heads=st.integers(1, 2), groups=st.integers(1, 3), t=st.integers(1, 3), e=st.integers(1, 5)
)
def test_value_mix_equals_its_definition(n: int, kv_heads: int, groups: int, t: int, e: int) -> None:
    q = normal(2, kv_heads * groups, t, e)
    entries = [normal(2, kv_heads, t, e, seed=j) for j in range(1, 2 * n + 1)]
    torch.testing.assert_close(depth_weights(q, entries[:n]), naive.depth_weights(q, entries[:n]))
    torch.testing.assert_close(mixed(q, *entries), unwrap(depth_value_mix)(q, entries[:n], entries[n:]))
    assert torch.autograd.gradcheck(mixed, (q, *entries))


def test_mix_of_keys() -> None:
    q, keys = normal(2, 4, 3, 4), [normal(2, 2, 3, 4, seed=j) for j in range(1, 4)]
    assert torch.autograd.gradcheck(lambda q, *keys: depth_value_mix(q, keys, keys), (q, *keys))


def test_weights_are_fp32_and_the_mix_has_the_dtype_of_the_values() -> None:
    q, key, value = (x.detach().bfloat16() for x in (normal(1, 2, 3, 4), normal(1, 1, 3, 4), normal(1, 1, 3, 4)))
    assert depth_weights(q, [key, key]).dtype == torch.float32
    assert depth_value_mix(q, [key, key], [value, value]).dtype == torch.bfloat16
    assert depth_value_mix(q, [key, key], [value, value.float()]).dtype == torch.float32
