import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from depthlm.mechanisms.depth_attention import DepthAttention
from depthlm.mechanisms.moda import Moda
from depthlm.model.attention.context import AttentionContext, KVCache
from depthlm.model.attention.self_attention import SelfAttention, attend_to
from depthlm.model.generation import generate


def test_a_state_has_one_size_for_any_number_of_tokens(make_decoder):
    model, sizes = make_decoder("kimi_linear", "kimi_micro", backbone_changes={"mixers": ["delta"]}), set()
    for length in (1, 3, 40):
        cache = model.make_cache()
        with torch.no_grad():
            model(torch.zeros(2, length, dtype=torch.long), cache=cache)
        sizes.add(cache.bytes())
    # of each layer: a matrix per head, and the last three inputs of three convolutions
    assert sizes == {4 * 2 * 4 * (2 * 32 * 32 + 3 * 3 * 64)}


@pytest.mark.parametrize("attention", [SelfAttention, DepthAttention, Moda])
def test_a_cache_of_latent_attention_holds_values_without_the_width_of_keys(make_decoder, attention):
    changes = {"mixers": ["latent"], "position": "none", "mlp": "swiglu", "qk_norm": "none"}
    model = make_decoder("qwen3", "kimi_micro", attention=attention, backbone_changes=changes)
    cache = model.make_cache()
    with torch.no_grad():
        model(torch.zeros(2, 5, dtype=torch.long), cache=cache)
    # two sequences of five tokens in four layers with two heads: keys of 48, values of 32
    assert cache.bytes() == 4 * 2 * 5 * 4 * 2 * (48 + 32)


def test_a_forward_pass_has_at_most_the_tokens_of_a_chunk(build, monkeypatch):
    model, lengths = build("model=vanilla"), []
    forward = model.forward

    def counted(tokens_bt: Tensor, *rest: Any, **settings: Any) -> Tensor:
        lengths.append(tokens_bt.shape[1])
        return forward(tokens_bt, *rest, **settings)

    monkeypatch.setattr(model, "forward", counted)
    generate(model, torch.randint(320, (2, 17)), 3, prefill_chunk=6)
    assert lengths == [6, 6, 5, 1, 1]


def test_chunks_need_a_cache(build):
    model = build("model=vanilla")
    for settings in ({"prefill_chunk": 0}, {"prefill_chunk": 4, "use_cache": False}):
        with pytest.raises(ValueError, match="prefill_chunk"):
            generate(model, torch.randint(320, (2, 17)), 1, **settings)


def test_grouped_queries_on_a_gpu_never_materialize_all_scores(monkeypatch):
    """Of SDPA's kernels on a GPU, the one for masks and for fp32 takes no grouped queries."""
    heads, copied = [], []

    def attention(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        heads.append((k.shape[1], settings["enable_gqa"]))
        copied.append(k)
        return q

    monkeypatch.setattr("depthlm.model.attention.self_attention.F.scaled_dot_product_attention", attention)
    with FakeTensorMode():
        # a prefill in chunks, then a whole sequence, in 16 and in 32 bits
        for dtype, keys in itertools.product((torch.bfloat16, torch.float32), (12, 4)):
            q = torch.empty(1, 8, 4, 16, device="cuda", dtype=dtype)
            k = torch.empty(1, 2, keys, 16, device="cuda", dtype=dtype)
            attend_to(q, k, k, AttentionContext())
        # without groups, nothing is copied
        attend_to(q, q, q, AttentionContext())
        assert copied.pop() is q
        heads.pop()
    assert heads == [(8, False), (2, True), (8, False), (8, False)]


def test_a_cache_without_an_initial_capacity_grows():
    cache, x_bkte = KVCache(1, 0), torch.ones(1, 1, 3, 4)
    assert cache.update(0, x_bkte, x_bkte)[0].shape == (1, 1, 3, 4)
