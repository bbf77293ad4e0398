import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from depthlm.accounting.flops import flops_per_token
from depthlm.model.experts import experts


@pytest.mark.parametrize("backbone", ["qwen3", "olmo2", "moda_layers", "lm1b", "qwen3_moe"])
def test_the_formula_equals_torch_flop_counter(vanilla, backbone, monkeypatch):
    # it does not count grouped products
    monkeypatch.setattr(experts, "GROUPED", {})
    model = vanilla("micro", backbone, "cpu", num_heads=4, num_kv_heads=2)
    tokens = torch.zeros(2, 24, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens)
    flops = flops_per_token(model, 24, causal=False)
    assert counter.get_total_flops() == flops.forward * 48
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).nll.backward()
    assert counter.get_total_flops() == flops.training * 48


def test_causal_attention_counts_half(vanilla):
    model = vanilla("1.5b", "qwen3")
    full, causal = flops_per_token(model, 2048, causal=False), flops_per_token(model, 2048)
    assert full.attention - causal.attention == 2 * 24 * 64 * 2048 * 48
    assert full.mlp == causal.mlp == 2 * 3 * 1536 * 4096 * 48
    assert full.head == 2 * 1536 * 50304
