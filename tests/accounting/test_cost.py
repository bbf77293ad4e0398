import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import depthlm
from depthlm.accounting.cost import count_parameters, flops_per_token
from depthlm.model import Decoder
from depthlm.model.attention import delta
from depthlm.model.experts import experts
from depthlm.ops.kimi_delta.naive import recurrence

from ..options import configuration


def vanilla(size: str, backbone: str, *overrides: str, device: str = "meta") -> Decoder:
    return depthlm.build_model(configuration(f"size={size}", f"backbone={backbone}", *overrides), device)


# size, backbone, published number of parameters, half a unit of its last digit
KNOWN = [
    ("360m", "qwen3", 360.67e6, 0.005e6),
    ("500m", "qwen3", 498.17e6, 0.005e6),
    ("710m", "qwen3", 716.07e6, 0.005e6),
    ("1.5b", "qwen3", 1343.8e6, 0.05e6),
    ("3b", "qwen3", 2748.0e6, 0.05e6),
    ("moda_700m", "olmo2", 669.046e6, 0.0005e6),
    ("moda_700m_38l", "olmo2", 700.510e6, 0.0005e6),
    ("moda_layers_24", "moda_layers", 71.35e6, 0.005e6),
    ("moda_layers_48", "moda_layers", 123.38e6, 0.005e6),
    ("lm1b", "lm1b", 49_646_890, 0),
]


@pytest.mark.parametrize(("size", "backbone", "expected", "rounding"), KNOWN)
def test_parameter_counts_equal_those_of_the_papers(size, backbone, expected, rounding):
    assert abs(count_parameters(vanilla(size, backbone))["total"] - expected) <= rounding


# Attention Residuals (arXiv 2603.15031), Table 2, in millions
@pytest.mark.parametrize("millions", [194, 241, 296, 436, 528])
def test_kimi_linear_has_the_activated_parameters_of_the_paper(millions):
    counts = count_parameters(vanilla(f"kimi_{millions}m", "kimi_linear"))
    # the table excludes embeddings
    assert round((counts["activated"] - counts["embedding"] - counts["head"]) / 1e6) == millions


def test_kimi_linear_48b_a3b_has_the_parameters_of_its_name():
    counts = count_parameters(vanilla("kimi_48b_a3b", "kimi_linear"))
    # 48B and 3B in the paper; the checkpoint has 49.1B
    assert counts["total"] == pytest.approx(49.12e9, rel=1e-3)
    assert counts["activated"] - counts["embedding"] == pytest.approx(3.1e9, rel=0.01)


@pytest.mark.parametrize("backbone", ["qwen3", "olmo2", "moda_layers", "lm1b", "qwen3_moe"])
def test_the_formula_equals_torch_flop_counter(backbone, monkeypatch):
    # it does not count grouped products
    monkeypatch.setattr(experts, "GROUPED", {})
    model = vanilla("micro", backbone, "size.num_heads=4", "size.num_kv_heads=2", device="cpu")
    tokens = torch.zeros(2, 24, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens)
    flops = flops_per_token(model, 24, causal=False)
    assert counter.get_total_flops() == flops.forward * 48
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).nll.backward()
    assert counter.get_total_flops() == flops.training * 48


def test_latent_attention_counts_the_scores_and_the_weighted_sum():
    model = vanilla("kimi_micro", "qwen3", "backbone.mixers=[latent]", "backbone.position=none", device="cpu")
    tokens, length = torch.zeros(2, 24, dtype=torch.long), 24
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens)
    # the values are widened by zeros to the width of the keys
    widened = 2 * model.size.num_heads * model.size.width_of_shared_key() * length * model.size.num_layers
    assert counter.get_total_flops() == (flops_per_token(model, length, causal=False).forward + widened) * 48


def test_delta_attention_counts_the_recurrence(monkeypatch):
    monkeypatch.setattr(delta, "delta_attention", recurrence)
    model = vanilla("kimi_micro", "qwen3", "backbone.mixers=[delta]", device="cpu")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 24, dtype=torch.long))
    heads, width = model.size.num_heads, model.size.head_size
    # the counter has neither the outer products with which the state is written nor the sums of the convolutions
    uncounted = (2 * heads * width**2 + 3 * 2 * 4 * heads * width) * model.size.num_layers
    assert counter.get_total_flops() == (flops_per_token(model, 24).forward - uncounted) * 48


def test_causal_attention_counts_half():
    model = vanilla("1.5b", "qwen3")
    full, causal = flops_per_token(model, 2048, causal=False), flops_per_token(model, 2048)
    assert full.attention - causal.attention == 2 * 24 * 64 * 2048 * 48
    assert full.mlp == causal.mlp == 2 * 3 * 1536 * 4096 * 48
    assert full.head == 2 * 1536 * 50304
