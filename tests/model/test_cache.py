import pytest
import torch

from depthlm.mechanisms.depth_attention import DepthAttention
from depthlm.mechanisms.moda import Moda
from depthlm.model.attention.context import KVCache
from depthlm.model.attention.self_attention import SelfAttention


def test_update_appends_tokens_and_grows_the_cache():
    cache = KVCache(slots=2, max_length=2)
    k, v = torch.randn(2, 3, 4, 7, 8)
    for start, end in ((0, 2), (2, 3), (3, 7)):
        for slot in range(2):
            all_k, all_v = cache.update(slot, k[:, :, start:end] + slot, v[:, :, start:end])
            assert torch.equal(all_k, k[:, :, :end] + slot)
            assert torch.equal(all_v, v[:, :, :end])
        cache.advance(end - start)
    assert cache.length == 7
    assert cache.bytes() == 2 * 2 * 3 * 4 * 7 * 8 * 4


@pytest.mark.parametrize("backbone", ["qwen3", "olmo2", "lm1b"])
@pytest.mark.parametrize("loops", [1, 2])
def test_sequence_in_pieces_with_cache_equals_full_sequence(make_decoder, backbone, loops):
    model = make_decoder(backbone, num_heads=4, num_kv_heads=2, loops=loops)
    tokens = torch.randint(0, 512, (2, 13), generator=torch.Generator().manual_seed(0))
    cache = model.make_cache(4)
    with torch.no_grad():
        pieces = [model(piece, cache=cache) for piece in tokens.split([5, 1, 4, 1, 2], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), atol=1e-4, rtol=1e-4)
    assert cache.length == 13
    assert cache.bytes() == 2 * 13 * loops * model.size.num_layers * 2 * model.size.num_kv_heads * 32 * 4


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
