"""The choice of an implementation: by token, by chunk, or by fla-core, which tests replace by the recurrence."""

import sys
from inspect import unwrap
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from depthlm.ops.kimi_delta import attention as module
from depthlm.ops.kimi_delta.attention import delta_attention, gated_rms_norm, l2_norm, short_convolution
from depthlm.ops.kimi_delta.chunked import CHUNK
from depthlm.ops.kimi_delta.naive import recurrence

from ..inputs import assert_close, normal
from .inputs import NAMES, inputs, results, starts

B, T = 3, 10


@pytest.mark.parametrize("t", [1, T])
def test_the_dtypes_do_not_depend_on_the_length(t):
    *arguments, _ = (x.detach().bfloat16() for x in inputs(B, t, 2, 4, 3))
    arguments[3] = arguments[3].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = delta_attention(*arguments)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    expected, _ = recurrence(*(x.double() for x in arguments))
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace fla-core by a literal implementation; return the names of its functions that ran."""
    names: list[str] = []

    def literal(
        name: str, *arguments: Tensor, initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Any = None
    ) -> tuple[Tensor, Tensor]:
        names.append(name)
        assert output_final_state
        if cu_seqlens is None:
            return recurrence(*arguments, initial_state)
        bounds = cu_seqlens.tolist()
        assert len(arguments[0]) == 1
        results = [
            recurrence(*(x[:, i:j] for x in arguments), None if initial_state is None else initial_state[n : n + 1])
            for n, (i, j) in enumerate(pairwise(bounds))
        ]
        outputs, states = zip(*results, strict=True)
        return torch.cat(outputs, dim=1), torch.cat(states)

    fla: Any = ModuleType("fla.ops.kda")
    for name in ("chunk_kda", "fused_recurrent_kda"):
        setattr(fla, name, lambda *arguments, name=name, **keywords: literal(name, *arguments, **keywords))
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.kda", fla)
    monkeypatch.setattr(module, "_by_fla", lambda *arguments: True)
    return names


@pytest.mark.parametrize(("share", "with_state"), [(None, True), (0.0, False), (0.3, True)])
def test_fla_gets_documents_as_sequences(share, with_state, ran):
    *arguments, state = (x.detach().float() for x in inputs(B, T, 2, 4, 3))
    documents = None if share is None else starts(B, T, share, seed=4)
    first = state if with_state else None
    found = delta_attention(*arguments, first, documents)
    torch.testing.assert_close(found, recurrence(*arguments, first, documents))
    assert ran == ["chunk_kda"]


def test_fla_decodes_by_its_recurrence_without_gradients(ran):
    *arguments, state = (x.detach().float() for x in inputs(B, 1, 2, 4, 3))
    with torch.no_grad():
        delta_attention(*arguments, state)
    delta_attention(*arguments, state)
    assert ran == ["fused_recurrent_kda", "chunk_kda"]


def test_the_recurrence_and_the_chunks_equal_the_naive_recurrence_of_fla():
    # fla-core is installed by the extra `kimi`, and has it in PyTorch
    naive = pytest.importorskip("fla.ops.kda.naive")
    arguments = [x.detach().float() for x in inputs(2, 75, 2, 8, 16)]
    q, k, v, g, beta, state = arguments
    expected = naive.naive_recurrent_kda(q, k, v, g, beta, initial_state=state, output_final_state=True)
    for function in (recurrence, delta_attention):
        torch.testing.assert_close(function(*arguments), expected, rtol=0, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("share", [None, 0.05])
def test_fla_equals_the_recurrence_on_a_gpu(share):
    pytest.importorskip("fla")
    exact, documents = inputs(B, 150, 2, 64, 64), None if share is None else starts(B, 150, share)
    rounded = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in exact]
    on_gpu = None if documents is None else documents.cuda()
    found = [x.cpu() for x in results(delta_attention, rounded, on_gpu)]
    assert_close(NAMES, found, results(recurrence, exact, documents), 3e-2)


@pytest.mark.slow
def test_the_operators_equal_those_of_transformers():
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    q, k, v, g, beta, state = arguments = [x.detach().float() for x in inputs(2, CHUNK + 9, 2, 8, 8)]
    for function in (kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention):
        # where fla-core is installed, transformers calls it
        expected = unwrap(function)(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)
        torch.testing.assert_close(delta_attention(*arguments), expected, rtol=0, atol=1e-5)
    x, gate, weight = (normal(*shape, seed=i).detach() for i, shape in enumerate([(B, T, 5), (B, T, 5), (5, 4)]))
    convolved = unwrap(kimi.causal_conv1d_fn)(x.mT, weight, activation="silu").mT
    torch.testing.assert_close(short_convolution(x, weight)[0], convolved)
    torch.testing.assert_close(l2_norm(x), kimi.l2norm(x))
    norm = kimi.KimiLinearRMSNormGated(5, eps=1e-5)
    norm.weight.data.copy_(normal(5, seed=2))
    for dtype in (torch.float32, torch.bfloat16):
        low = [y.to(dtype) for y in (x, gate)]
        torch.testing.assert_close(gated_rms_norm(*low, norm.weight, 1e-5), norm(*low))
