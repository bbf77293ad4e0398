import pytest
import torch
from torch.utils._pytree import tree_leaves

from depthlm.locations import CONF
from depthlm.model.layer import Observer
from depthlm.model.layers import apply_rope, rope_tables, sinusoids

CONNECTIONS = sorted(path.stem for path in (CONF / "model" / "connection").glob("*.yaml"))


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


class Dtypes(Observer):
    """The dtypes of what layers pass on, but for maps, of which each token has a few, and for sums of later reads."""

    def __init__(self):
        self.found = set()

    def layer(self, position, state, depth):
        passed = [value for name, value in state._asdict().items() if name != "ahead"]
        self.found |= {x.dtype for x in tree_leaves(passed) if torch.is_tensor(x) and x.shape[-1] == 32}


@pytest.mark.parametrize(
    "mechanism",
    [*(f"model/connection={name}" for name in CONNECTIONS), "model/connection=laurel model.connection.variant=rw"],
)
def test_all_that_layers_pass_on_is_in_bf16_under_autocast(build, mechanism):
    model, dtypes = build(*mechanism.split()), Dtypes()
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.arange(16)[None], observer=dtypes)
    assert dtypes.found == {torch.bfloat16}


@pytest.mark.parametrize("preset", ["vanilla", "mhc", "denseformer"])
def test_the_residual_stream_may_stay_in_fp32(build, preset):
    model, dtypes = build(f"model={preset}", "precision.fp32_residual=true"), Dtypes()
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.arange(16)[None], observer=dtypes)
        assert torch.float32 in dtypes.found
        assert model.hidden(torch.arange(16)[None]).dtype == torch.float32
