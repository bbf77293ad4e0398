import pytest
import torch

from depthlm.evaluation.generation import generate
from depthlm.mechanisms.residual import Residual
from depthlm.model.attention.self_attention import SelfAttention
from depthlm.model.decoder import Decoder
from depthlm.model.parameters import initialize
from depthlm.model.shape import Backbone, Size

PROMPT = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.fixture(params=["rope", "sinusoidal"])
def model(request):
    torch.set_num_threads(1)
    size = Size("", 64, 128, 3, 4, 2, 16, 97)
    decoder = Decoder(size, Backbone(position=request.param), Residual, SelfAttention)
    initialize(decoder, seed=0, std=0.2)
    return decoder


def test_the_cache_does_not_change_the_text(model):
    cached = generate(model, PROMPT, 20)
    assert cached.shape == (2, 25)
    assert torch.equal(cached, generate(model, PROMPT, 20, use_cache=False))
    sampled = [
        generate(model, PROMPT, 20, temperature=0.8, generator=torch.Generator().manual_seed(1), use_cache=use)
        for use in (True, False)
    ]
    assert torch.equal(*sampled)


def test_the_narrowest_top_k_and_top_p_equal_greedy_decoding(model):
    greedy = generate(model, PROMPT, 10)
    assert torch.equal(generate(model, PROMPT, 10, temperature=1.0, top_k=1), greedy)
    assert torch.equal(generate(model, PROMPT, 10, temperature=1.0, top_p=1e-6), greedy)
    assert not torch.equal(generate(model, PROMPT, 10, temperature=5.0), greedy)


def test_top_k_and_top_p_sample_only_from_the_tokens_they_keep(model):
    generator = torch.Generator().manual_seed(0)
    prompt = PROMPT[:1].expand(400, -1)
    probabilities, order = model(PROMPT[:1])[0, -1].softmax(0).sort(descending=True)
    drawn = generate(model, prompt, 1, temperature=1.0, top_k=3, generator=generator)[:, -1]
    assert set(drawn.tolist()) <= set(order[:3].tolist())
    drawn = generate(model, prompt, 1, temperature=1.0, top_p=0.5, generator=generator)[:, -1]
    kept = int((probabilities.cumsum(0) - probabilities < 0.5).sum())
    assert set(drawn.tolist()) <= set(order[:kept].tolist())


def test_a_row_ends_at_eos(model):
    greedy = generate(model, PROMPT, 12)
    eos = int(greedy[0, 7])
    tokens = generate(model, PROMPT, 12, eos=eos)
    first = (greedy[0, 5:] == eos).nonzero()[0, 0] + 5
    assert (tokens[0, first:] == eos).all()
    assert generate(model, PROMPT[:1], 12, eos=eos).shape[1] == first + 1


@pytest.mark.parametrize("settings", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_invalid_settings_are_refused(model, settings):
    with pytest.raises(ValueError, match="must hold"):
        generate(model, PROMPT, 1, **settings)
    with pytest.raises(ValueError, match="empty"):
        generate(model, PROMPT[:, :0], 1)
