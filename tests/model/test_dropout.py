"""`backbone.dropout`: its places, and what the masks do not depend on."""

import pytest
import torch
import torch.nn.functional as F

from depthlm.model.compilation import compile_sublayers
from depthlm.model.layers import apply_rope, rope_tables, sinusoids
from depthlm.ops.dropout import ATTENTION_OUTPUT, ATTENTION_WEIGHTS, HIDDEN, MLP_OUTPUT, Dropout, draw_mask

RATE = 0.3


@pytest.fixture
def batch():
    tokens = torch.randint(0, 256, (4, 12), generator=torch.Generator().manual_seed(0))
    return tokens, torch.tensor([11, -5, 2**31 - 1, 0], dtype=torch.int32)


def gradients(model, tokens_bt, seeds_b):
    loss = model(tokens_bt[:, :-1], tokens_bt[:, 1:], seeds_b=seeds_b).nll
    return loss, torch.autograd.grad(loss, list(model.parameters()))


def literal(model, tokens_bt, seeds_b):
    """The formulas of Flax's LM1B example, and of the same places in a layer of SwiGLU and rotated keys."""
    backbone, size = model.backbone, model.size

    def drop(x, how, place):
        return x * draw_mask(x.shape, how.at(place)) / (1 - RATE)

    def norm(module, x):
        if module.bias is not None:
            return F.layer_norm(x, x.shape[-1:], module.weight, module.bias, module.eps)
        return F.rms_norm(x, x.shape[-1:], module.weight, module.eps)

    how = Dropout(RATE, seeds_b)
    positions = torch.arange(tokens_bt.shape[1])
    x = model.embedding.weight[tokens_bt]
    if backbone.position == "sinusoidal":
        x = x + sinusoids(positions, size.hidden_size)
    x = drop(x, how, 0)
    for number, layer in enumerate(model.layers):
        of_layer, attention, mlp = how.at(number + 1), layer.attention, layer.mlp
        y = norm(layer.attention_norm, x) if backbone.norm_placement == "pre" else x
        q, k, v = attention.q_proj(y), attention.k_proj(y), attention.v_proj(y)
        if backbone.qk_norm == "full":
            q, k = norm(attention.q_norm, q), norm(attention.k_norm, k)
        q, k, v = (z.unflatten(-1, (-1, size.head_size)) for z in (q, k, v))
        if backbone.position == "rope":
            rope = rope_tables(positions, size.head_size, backbone.rope_theta)
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        groups = size.num_heads // size.num_kv_heads
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        scores = torch.einsum("bthe,bshe->bhts", q, k) / size.head_size**0.5
        future = positions[None, :] > positions[:, None]
        weights = drop(scores.masked_fill(future, -torch.inf).softmax(-1), of_layer, ATTENTION_WEIGHTS)
        y = attention.o_proj(torch.einsum("bhts,bshe->bthe", weights, v).flatten(2))
        y = norm(layer.attention_norm, y) if backbone.norm_placement == "post" else y
        x = x + drop(y, of_layer, ATTENTION_OUTPUT)
        y = norm(layer.mlp_norm, x) if backbone.norm_placement == "pre" else x
        if backbone.mlp == "relu":
            hidden = mlp.up_proj(y).relu()
        else:
            hidden = F.silu(mlp.gate_proj(y)) * mlp.up_proj(y)
        y = F.linear(drop(hidden, of_layer, HIDDEN), mlp.down_proj.weight, mlp.down_proj.bias)
        y = norm(layer.mlp_norm, y) if backbone.norm_placement == "post" else y
        x = x + drop(y, of_layer, MLP_OUTPUT)
    return F.linear(norm(model.final_norm, x), model.head.weight, model.head.bias)


@pytest.mark.parametrize("backbone", ["lm1b", "olmo2"])
def test_losses_equal_the_literal_formulas(make_decoder, batch, backbone):
    model = make_decoder(backbone, backbone_changes={"dropout": RATE, "tie_embeddings": False}).double()
    tokens, seeds = batch
    loss = model(tokens[:, :-1], tokens[:, 1:], seeds_b=seeds)
    expected = F.cross_entropy(literal(model, tokens[:, :-1], seeds).flatten(0, 1), tokens[:, 1:].flatten())
    # the scores of attention are in fp32
    torch.testing.assert_close(loss.nll / loss.tokens, expected, rtol=1e-6, atol=0)


def test_evaluation_has_no_dropout(make_decoder, batch):
    tokens, seeds = batch
    plain, model = make_decoder(), make_decoder(backbone_changes={"dropout": RATE})
    assert torch.equal(model(tokens), plain(tokens))
    assert torch.equal(plain(tokens, seeds_b=seeds), plain(tokens))
    assert not torch.allclose(model(tokens, seeds_b=seeds), plain(tokens))


@pytest.mark.parametrize("how", [True, 2, "selective"])
def test_recomputed_activations_have_the_same_masks(make_decoder, batch, how):
    model = make_decoder("lm1b", backbone_changes={"dropout": RATE}, loops=2)
    loss, expected = gradients(model, *batch)
    model.checkpoint_activations(how)
    again, actual = gradients(model, *batch)
    assert torch.equal(loss, again)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_sequence_has_the_same_masks_in_any_micro_batch(make_decoder, batch):
    model = make_decoder("lm1b", backbone_changes={"dropout": RATE}).double()
    tokens, seeds = batch
    logits = model(tokens, seeds_b=seeds)
    torch.testing.assert_close(
        torch.cat([model(tokens[i : i + 1], seeds_b=seeds[i : i + 1]) for i in range(4)]), logits
    )


def test_attention_weights_drop_out_within_documents(make_decoder, batch):
    tokens, seeds = batch
    tokens[:, 5] = 3
    model = make_decoder(backbone_changes={"dropout": RATE})
    model.end_of_text = 3
    logits = model(tokens, seeds_b=seeds)
    changed = tokens.clone()
    changed[:, :5] = 7
    assert torch.equal(model(changed, seeds_b=seeds)[:, 6:], logits[:, 6:])


@pytest.mark.slow
def test_compiled_sublayers_have_the_same_masks(make_decoder, batch):
    # what other models were compiled for would make it compile for any shape, which takes long
    torch.compiler.reset()
    model = make_decoder("lm1b", backbone_changes={"dropout": RATE})
    loss, expected = gradients(model, *batch)
    compile_sublayers(model, backend="aot_eager")
    again, actual = gradients(model, *batch)
    torch.testing.assert_close(again, loss)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
