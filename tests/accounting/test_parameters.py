import dataclasses

import pytest
import yaml
from pydantic import TypeAdapter

from depthlm.accounting.parameters import count_parameters
from depthlm.locations import CONF
from depthlm.model.shape import Backbone, Size

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
    ("lm1b", "lm1b", 49_653_040, 0),
]


@pytest.mark.parametrize(("size", "backbone", "expected", "rounding"), KNOWN)
def test_parameter_counts_equal_those_of_the_papers(vanilla, size, backbone, expected, rounding):
    assert abs(count_parameters(vanilla(size, backbone))["total"] - expected) <= rounding


# Attention Residuals (arXiv 2603.15031), Table 2, in millions
@pytest.mark.parametrize("millions", [194, 241, 296, 436, 528])
def test_kimi_linear_has_the_activated_parameters_of_the_paper(vanilla, millions):
    counts = count_parameters(vanilla(f"kimi_{millions}m", "kimi_linear"))
    # the table excludes embeddings
    assert round((counts["activated"] - counts["embedding"] - counts["head"]) / 1e6) == millions


def test_kimi_linear_48b_a3b_has_the_parameters_of_its_name(vanilla):
    counts = count_parameters(vanilla("kimi_48b_a3b", "kimi_linear"))
    # 48B and 3B in the paper; the checkpoint has 49.1B
    assert counts["total"] == pytest.approx(49.12e9, rel=1e-3)
    assert counts["activated"] - counts["embedding"] == pytest.approx(3.1e9, rel=0.01)


@pytest.mark.parametrize("backbone", ["qwen3", "olmo2", "moda_layers", "lm1b"])
def test_parts_add_up_to_the_total(vanilla, backbone):
    model = vanilla("micro", backbone)
    counts = count_parameters(model)
    assert counts["total"] == sum(p.numel() for p in model.parameters())
    assert counts["embedding"] == 512 * 64
    assert counts["connection"] == 0
    assert counts["head"] == {"qwen3": 512 * 64, "lm1b": 512 * 64 + 512}.get(backbone, 0)


def test_every_size_and_backbone_sets_every_field():
    for folder, shape in (("size", Size), ("backbone", Backbone)):
        paths = sorted((CONF / folder).glob("*.yaml"))
        assert paths
        for path in paths:
            settings = yaml.safe_load(path.read_text())
            # those of experts and of other mixers have no effect without them
            parts, fields = ("mlp=experts", "mixer latent", "how the layers mix tokens"), dataclasses.fields(shape)
            always = {
                field.name for field in fields if not any(part in field.metadata["description"] for part in parts)
            }
            # by default, the embedding starts like the matrices
            always -= {"embedding_init_std"}
            assert always <= settings.keys() <= {field.name for field in dataclasses.fields(shape)}, path
            assert settings["name"] == path.stem
            for field in dataclasses.fields(shape):
                if field.name in settings:
                    TypeAdapter(field.type).validate_python(settings[field.name], strict=True)
