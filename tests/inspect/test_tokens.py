"""Pictures of the weights of single tokens: their arrays equal those of the means, and their axes name the tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from depthlm.inspect import collect
from depthlm.inspect.picture import Picture
from depthlm.model import Decoder

from .conftest import TOKENS

NAMES = [f"t{number}" for number in range(12)]


def pictures_of(
    model: Decoder, *windows: torch.Tensor, names: Sequence[str] = NAMES
) -> tuple[dict[str, Picture], dict[str, Any]]:
    """Return the pictures of a decoder by name, drawn once, and all their arrays."""
    pictures, _ = collect(model, windows or (TOKENS[:1],), names)
    for picture in pictures:
        picture.draw()
    return {picture.name: picture for picture in pictures}, {
        name: array for picture in pictures for name, array in picture.arrays.items()
    }


def with_noise(model: Decoder) -> Decoder:
    """Return the decoder with noise on the parameters of its connections; initially all tokens have equal weights."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.connections.parameters():
        parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def test_the_mean_of_the_tokens_is_what_the_picture_without_tokens_shows(build):
    _, found = pictures_of(build("model=depth_attention"))
    for layer, sources in ((1, [0, 1]), (2, [0, 2]), (3, [0, 2, 3])):
        values = found[f"depth_attention_weights_tokens_{layer}"]
        assert values.shape == (len(sources), 12)
        np.testing.assert_allclose(values.mean(1), found["depth_attention_weights"].mean(-1)[layer, sources], rtol=1e-5)
    _, found = pictures_of(with_noise(build("model=attention_residuals")))
    final = found["attention_residuals_weights_tokens_final"]
    np.testing.assert_allclose(final.mean(1), found["attention_residuals_weights_final"], rtol=1e-5)
    _, found = pictures_of(with_noise(build("model=dca")))
    values = found["dca_weights_tokens_attention_3"]
    np.testing.assert_allclose(values.mean(-1), found["dca_weights_attention"][3, :, :4], rtol=1e-5)
    assert (values.std(-1).max(-1) > 0).all()
    _, found = pictures_of(with_noise(build("model=mhc")))
    for place in ("pre_{}attention_0", "post_{}mlp_2"):
        values, means = found[f"mhc_{place.format('tokens_')}"], found[f"mhc_{place.format('')[:-2]}"]
        np.testing.assert_allclose(values.mean(1), means[int(place[-1])], rtol=1e-5)


def test_weights_that_are_the_same_for_all_tokens_have_no_picture_of_tokens(build):
    pictures, _ = pictures_of(with_noise(build("model=hyper_connections", "model.connection.dynamic=false")))
    assert not [name for name in pictures if "tokens" in name]


def test_only_the_first_window_of_a_given_text_is_shown_with_its_tokens(build):
    model = build("model=depth_attention")
    _, alone = pictures_of(model, TOKENS[:1], names=NAMES[:7])
    _, first = pictures_of(model, TOKENS[:2], TOKENS[2:], names=NAMES[:7])
    assert first["depth_attention_weights_tokens_3"].shape == (3, 7)
    np.testing.assert_allclose(
        first["depth_attention_weights_tokens_3"], alone["depth_attention_weights_tokens_3"], rtol=1e-5
    )
    pictures, _ = pictures_of(model, names=())
    assert list(pictures) == ["depth_attention_weights"]
