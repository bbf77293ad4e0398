import pytest
import torch

from depthlm.model.layers import apply_rope, rope_tables, sinusoids

from .conftest import PRESETS


def test_rope_is_precise_in_bf16():
    x = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    tables = rope_tables(torch.arange(4000, 4004), 64, 10000.0)
    assert tables[0].dtype == torch.float32
    assert torch.equal(apply_rope(x, tables), apply_rope(x.float(), tables).bfloat16())


def test_sinusoids():
    table = sinusoids(torch.arange(5), 7)
    assert table.shape == (5, 7)
    torch.testing.assert_close(table[:, 0], torch.arange(5.0).sin())
    torch.testing.assert_close(table[:, 5], (torch.arange(5.0) * 1e-4).cos())
    assert (table[:, 6] == 0).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_the_residual_stream_has_the_dtype_of_matrix_products_or_fp32(build, preset):
    model, tokens = build(f"model={preset}"), torch.arange(16)[None]
    for model.fp32_residual, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        with torch.autocast("cpu", torch.bfloat16):
            assert model.hidden(tokens).dtype == dtype
    assert model.hidden(tokens).dtype == torch.float32
