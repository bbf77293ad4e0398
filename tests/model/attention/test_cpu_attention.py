import pytest
import torch
import torch.nn.functional as F

from depthlm.model.attention.cpu_attention import CausalAttention


def inputs(length, heads, kv_heads, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, n, 16) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(s, generator=generator).to(dtype).transpose(1, 2).requires_grad_() for s in shapes]


def reference(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("length", [2, 63, 64, 65, 200])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_equals_pytorch(length, heads, kv_heads):
    tensors = inputs(length, heads, kv_heads)
    ours, theirs = CausalAttention.apply(*tensors), reference(*tensors)
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    for a, b in zip(*(torch.autograd.grad(y, tensors, grad) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_bf16_is_near_fp32():
    tensors = inputs(130, 4, 2, torch.bfloat16)
    expected = reference(*(t.float() for t in tensors))
    assert (CausalAttention.apply(*tensors).float() - expected).abs().max() < 0.03


def test_gradients_in_fp64(monkeypatch):
    monkeypatch.setattr("depthlm.model.attention.cpu_attention.ROWS", 3)
    tensors = [t.detach().double().requires_grad_() for t in inputs(7, 4, 2)]
    assert torch.autograd.gradcheck(CausalAttention.apply, tensors)
