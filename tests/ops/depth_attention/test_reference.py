"""The value mix over depth equals its formula, and its gradients equal numerical derivatives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlm.ops.depth_attention.reference import check_entries, depth_value_mix, depth_weights

from ..inputs import normal


def mixed(q: torch.Tensor, *entries: torch.Tensor) -> torch.Tensor:
    return depth_value_mix(q, entries[: len(entries) // 2], entries[len(entries) // 2 :])


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 4), kv_heads=st.integers(1, 2), groups=st.integers(1, 3), t=st.integers(1, 3), e=st.integers(1, 5)
)
def test_value_mix_equals_attention_over_depth(n: int, kv_heads: int, groups: int, t: int, e: int) -> None:
    q = normal(2, kv_heads * groups, t, e)
    entries = [normal(2, kv_heads, t, e, seed=j) for j in range(1, 2 * n + 1)]
    keys, values = (torch.stack(x) for x in (entries[:n], entries[n:]))
    mean = q.view(2, kv_heads, groups, t, e).mean(2)
    alpha = (torch.einsum("bkte,nbkte->nbkt", mean, keys) / e**0.5).softmax(0)
    torch.testing.assert_close(depth_weights(q, entries[:n]), alpha)
    torch.testing.assert_close(mixed(q, *entries), torch.einsum("nbkt,nbkte->bkte", alpha, values))
    assert torch.autograd.gradcheck(mixed, (q, *entries))


def test_mix_of_keys() -> None:
    q, keys = normal(2, 4, 3, 4), [normal(2, 2, 3, 4, seed=j) for j in range(1, 4)]
    assert torch.autograd.gradcheck(lambda q, *keys: depth_value_mix(q, keys, keys), (q, *keys))


def test_weights_are_fp32_and_the_mix_has_the_dtype_of_the_values() -> None:
    q, key, value = (x.detach().bfloat16() for x in (normal(1, 2, 3, 4), normal(1, 1, 3, 4), normal(1, 1, 3, 4)))
    assert depth_weights(q, [key, key]).dtype == torch.float32
    assert depth_value_mix(q, [key, key], [value, value]).dtype == torch.bfloat16
    assert depth_value_mix(q, [key, key], [value, value.float()]).dtype == torch.float32


def test_mismatched_entries_are_refused() -> None:
    q, x = normal(1, 4, 3, 4).detach().float(), normal(1, 2, 3, 4).detach().float()
    with pytest.raises(ValueError, match="2 keys and 1 values"):
        check_entries("mix", q, [x, x], [x])
    with pytest.raises(ValueError, match="4 query heads, must be a multiple of the 3"):
        check_entries("mix", q, [x.new_zeros(1, 3, 3, 4)], [x])
    with pytest.raises(ValueError, match=r"values\[1\] is \[1, 2, 2, 4\], must be \[1, 2, 3, 4\]"):
        check_entries("mix", q, [x, x], [x, x[:, :, 1:]])
    with pytest.raises(TypeError, match=r"keys\[0\] is torch.float64"):
        check_entries("mix", q, [x.double()], [x])
    with pytest.raises(ValueError, match="is on meta, must be on cpu"):
        check_entries("mix", q, [x.to("meta")], [x])
