"""Flash attention by document equals attention with a mask.

Without a GPU, its two operators are replaced by a literal implementation of what they compute.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import depthlm
from depthlm.config import compose
from depthlm.model.attention import context
from depthlm.model.attention.context import find_documents
from depthlm.ops import flash
from depthlm.ops.flash import attend_by_document
from depthlm.ops.moda.bank import depth_of
from depthlm.ops.moda.merge import attend_with_scores, merged_attention

# where documents end in each row: a document of length 1; the first and the last token; none
ENDS = [[2, 3, 7], [0, 11], []]
B, T, E = len(ENDS), 12, 8


def weights_of(q_the: Tensor, k_ske: Tensor) -> Tensor:
    """Return the scores of a document, score_hts, with -inf above the diagonal."""
    k_she = k_ske.repeat_interleave(q_the.shape[1] // k_ske.shape[1], 1)
    score_hts = torch.einsum("the,she->hts", q_the, k_she) * q_the.shape[2] ** -0.5
    return score_hts.masked_fill(~torch.ones(score_hts.shape[1:], dtype=torch.bool).tril(), -torch.inf)


def literal_forward(
    q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_k: Tensor, longest: int, _: int, dropout: float, causal: bool,
    debug: bool,
) -> Any:  # fmt: skip
    assert causal
    assert not dropout + debug
    assert of_q is of_k
    assert all(x.is_contiguous() for x in (q, k, v, of_q))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
    assert longest >= of_q.diff().max()
    for first, end in zip(of_q.tolist(), of_q.tolist()[1:], strict=False):
        score_hts = weights_of(q[first:end], k[first:end])
        lse[:, first:end] = score_hts.logsumexp(-1)
        v_she = v[first:end].repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[first:end] = torch.einsum("hts,she->the", score_hts.softmax(-1), v_she)
    seed, unused, no_mask = torch.zeros(3, 2)
    return out, lse, seed, unused, no_mask


def literal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, of_q: Tensor, *arguments: Any
) -> Any:
    """The gradients follow from the output and the log-sum-exp that are given, as in flash attention."""
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    groups = q.shape[1] // k.shape[1]
    for first, end in zip(of_q.tolist(), of_q.tolist()[1:], strict=False):
        part = slice(first, end)
        p_hts = (weights_of(q[part], k[part]) - lse[:, part, None]).exp()
        k_she, v_she = (x[part].repeat_interleave(groups, 1) for x in (k, v))
        of_p = torch.einsum("the,she->hts", grad[part], v_she) - (grad * out).sum(-1)[part].T[..., None]
        ds_hts = p_hts * of_p * q.shape[2] ** -0.5
        grads[0][part] = torch.einsum("hts,she->the", ds_hts, k_she)
        for x, (weight, other) in zip(grads[1:], ((ds_hts, q), (p_hts, grad)), strict=True):
            x[part] = torch.einsum("hts,the->she", weight, other[part]).unflatten(1, (-1, groups)).sum(2)
    return tuple(grads)


@pytest.fixture
def literal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the operators of a GPU; return the names of those that ran."""
    ran: list[str] = []

    def recorded(name: str, function: Any) -> Any:
        return lambda *arguments: (ran.append(name), function(*arguments))[1]

    operators = {"_flash_attention_forward": literal_forward, "_flash_attention_backward": literal_backward}
    monkeypatch.setattr(flash, "aten", SimpleNamespace(**{k: recorded(k, v) for k, v in operators.items()}))
    monkeypatch.setattr(context, "takes_documents", lambda q: True)
    return ran


def documents(device: str = "cpu") -> Any:
    ends = torch.zeros(B, T, dtype=torch.bool)
    for row, places in zip(ends, ENDS, strict=True):
        row[places] = True
    return find_documents(ends.to(device)).mask


def tensors(heads: int, kv_heads: int, entries: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads)
    shapes = [heads, kv_heads, kv_heads, *[kv_heads] * (2 * entries)]
    made = [torch.randn(B, T, n, E, generator=generator, dtype=torch.float64) for n in shapes]
    # as the projections return them: tokens before heads in memory
    return [x.transpose(1, 2).requires_grad_() for x in made]


def gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    along = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output, *torch.autograd.grad(output, inputs, along.to(output))]


def masked(inputs: list[Tensor], mask: Tensor) -> Tensor:
    q, k, v = inputs
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_attention_by_document_equals_a_mask(literal):
    inputs, mask = tensors(6, 2, 0), documents()
    found = gradients(attend_by_document(*inputs, mask.bounds), inputs)
    expected = gradients(masked(inputs, mask.mask_b1ts), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert literal == ["_flash_attention_forward", "_flash_attention_backward"]


def test_merged_attention_by_document_equals_a_mask(literal):
    inputs, mask = tensors(4, 2, 3), documents()
    q, k, v, *depth = inputs
    pairs = list(zip(depth[::2], depth[1::2], strict=True))
    found = gradients(merged_attention(q, k, v, depth_of(pairs), None, mask.bounds), inputs)
    expected = gradients(attend_with_scores(q, k, v, pairs, mask.mask_b1ts), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert literal == ["_flash_attention_forward", "_flash_attention_backward"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_attention_by_document_equals_a_mask_on_a_gpu():
    exact, mask = tensors(6, 2, 0), documents("cuda")
    inputs = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in exact]
    found = gradients(attend_by_document(*inputs, mask.bounds), inputs)
    expected = gradients(masked(exact, mask.mask_b1ts.cpu()), exact)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double().cpu(), b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("preset", ["depth_attention", "moda"])
def test_a_decoder_on_a_gpu_attends_by_document(preset, request):
    model = depthlm.build_model(compose([f"model={preset}", "size=micro"], here=False)).double()
    model.end_of_text = 0
    tokens = torch.randint(4, (B, T), generator=torch.Generator().manual_seed(0))
    along = torch.randn(B, T, model.size.vocab_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def results() -> list[Tensor]:
        logits = model(tokens)
        return [logits, *torch.autograd.grad(logits, model.parameters(), along, allow_unused=True)]

    expected, ran = results(), request.getfixturevalue("literal")
    torch.testing.assert_close(results(), expected, rtol=1e-9, atol=1e-12)
    assert ran.count("_flash_attention_forward") == ran.count("_flash_attention_backward") == model.size.num_layers
    # tokens in a cache need a mask
    cache = model.make_cache()
    pieces = [model(piece, cache=cache) for piece in tokens.split((5, 1, 6), dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected[0], rtol=1e-9, atol=1e-12)
