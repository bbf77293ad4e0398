"""The operators of delta attention equal those of transformers, whose import takes seconds."""

from inspect import unwrap

import pytest
import torch

from depthlm.ops.kimi_delta.attention import gated_rms_norm, l2_norm, short_convolution
from depthlm.ops.kimi_delta.chunked import CHUNK, chunked

from ..inputs import normal
from .inputs import inputs

pytestmark = pytest.mark.slow
B, T, C = 2, 9, 5


@pytest.fixture(scope="module")
def kimi():
    return pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")


@pytest.mark.parametrize("function", ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"])
def test_delta_attention(kimi, function: str) -> None:
    q, k, v, g, beta, state = arguments = [x.detach().float() for x in inputs(2, CHUNK + 9, 2, 8, 8)]
    # where fla-core is installed, transformers calls it
    expected = unwrap(getattr(kimi, function))(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)
    torch.testing.assert_close(chunked(*arguments), expected, rtol=0, atol=1e-5)


def test_convolution_and_norms(kimi) -> None:
    x, gate, weight = (normal(*shape, seed=i).detach() for i, shape in enumerate([(B, T, C), (B, T, C), (C, 4)]))
    expected = unwrap(kimi.causal_conv1d_fn)(x.mT, weight, activation="silu").mT
    torch.testing.assert_close(short_convolution(x, weight)[0], expected)
    torch.testing.assert_close(l2_norm(x), kimi.l2norm(x))
    norm = kimi.KimiLinearRMSNormGated(C, eps=1e-5)
    norm.weight.data.copy_(normal(C, seed=2))
    for dtype in (torch.float32, torch.bfloat16):
        low = [y.to(dtype) for y in (x, gate)]
        torch.testing.assert_close(gated_rms_norm(*low, norm.weight, 1e-5), norm(*low))
