"""Which mechanisms compute what vanilla computes, with vanilla's weights: as they are, with a setting, or with none."""

import copy
import logging
import re
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import depthlm
from depthlm.config import Config
from depthlm.locations import CONF
from depthlm.mechanisms.residual import Residual
from depthlm.model import Decoder
from depthlm.training.checkpoint import init_from
from depthlm.training.checkpoint.init_from import Source, copy_weights, import_weights

from ...options import mechanism, option

PLAIN = {"connection": "residual", "attention": "self_attention"}
SHAPE = {
    "num_layers": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_size": 8,
    "vocab_size": 320,
}  # fmt: skip
TOKENS = torch.randint(0, 320, (2, 12), generator=torch.Generator().manual_seed(0))


def presets() -> list[Any]:
    """Return the name and the parts of every preset and of every connection without one."""
    found = {}
    for path in sorted((CONF / "model").glob("*.yaml")):
        found[path.stem] = mechanism(path.stem)
    for path in sorted((CONF / "model/connection").glob("*.yaml")):
        if path.stem not in found and path.stem != "residual":
            found[path.stem] = parts(connection=option("model/connection", path.stem))
    return [pytest.param(model, id=name) for name, model in found.items()]


def parts(**changed: dict[str, Any]) -> dict[str, Any]:
    return {part: option(f"model/{part}", name) for part, name in PLAIN.items()} | changed


@pytest.fixture(scope="module")
def base() -> Config:
    config = depthlm.compose(["size=micro", "data.tokenizer=bytes", "precision=fp32"])
    # a larger std than that of the size, so that every part affects the logits
    return replace(config, size=replace(config.size, **SHAPE, init_std=0.1))


@pytest.fixture(scope="module")
def vanilla(base: Config) -> Decoder:
    return depthlm.build_model(replace(base, seed=5)).double()


@pytest.fixture
def started(base: Config, vanilla: Decoder, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Build a decoder and import the weights of vanilla, as a run with `init_from` does."""
    save_file(vanilla.state_dict(), tmp_path / "model.safetensors")
    saved = {"model": asdict(base.model), "backbone": asdict(base.backbone), "size": asdict(base.size)}
    # without a process group
    monkeypatch.setattr(init_from, "on_rank_0", lambda find: Source(tmp_path, saved))

    def start(model: dict[str, Any]) -> Decoder:
        config = replace(base, model=replace(base.model, name="other", **model), init_from=str(tmp_path))
        decoder = depthlm.build_model(config).double()
        import_weights(config, decoder)
        return decoder

    return start


def setting_of(decoder: Decoder) -> tuple[str, str | None]:
    """Return the part of a decoder that is not vanilla's, and the setting with which it starts as vanilla."""
    connection, attention = decoder.connections[0], decoder.layers[0].attention
    if isinstance(connection, Residual):
        return "attention", attention.identity_start
    return "connection", connection.identity_start


def with_setting(model: dict[str, Any], part: str, setting: str) -> dict[str, Any]:
    name, _, value = setting.partition("=")
    return model | {part: model[part] | {name: float(value) if value[0].isdigit() else value}}


@pytest.mark.parametrize("model", presets())
def test_a_mechanism_takes_vanillas_weights_and_its_own_and_says_how_it_starts_as_vanilla(
    started, vanilla, model, caplog
):
    if "shared_kv" in model["attention"]["_target_"]:
        with pytest.raises(depthlm.errors.UserError, match="no such parameter"):
            started(model)
        return
    caplog.set_level(logging.WARNING)
    decoder, expected, source = started(model), vanilla(TOKENS), vanilla.state_dict()
    for key, tensor in decoder.state_dict().items():
        # each of the three norms of an attention's inputs gets the weights of vanilla's single norm
        shared = re.sub(r"_norm\.[012]", "_norm", key)
        assert shared not in source or torch.equal(tensor, source[shared]), key
    assert copy_weights(decoder.state_dict(), copy.deepcopy(decoder)) == []
    part, setting = setting_of(decoder)
    same = torch.allclose(decoder(TOKENS), expected, rtol=0, atol=1e-9)
    assert same == (setting == "")
    assert ("does not initially compute" in caplog.text) == (setting != "")
    if setting:
        assert f"with model.{part}.{setting} it does" in caplog.text
        caplog.clear()
        decoder = started(with_setting(model, part, setting))
        assert setting_of(decoder)[1] == ""
        # the biases of mhc are in fp32, and each sublayer reduces its streams by res_eps
        tolerance = 1e-12 if "mhc" not in model[part]["_target_"] else 1e-9 + 100 * model[part]["res_eps"]
        torch.testing.assert_close(decoder(TOKENS), expected, rtol=0, atol=tolerance)
        assert "does not initially compute" not in caplog.text


IDENTITY = {"start": "identity"}


def test_a_start_that_cannot_be_vanillas_is_refused(base):
    for part, name, settings, message in (
        ("attention", "value_residual", {"weights": "fixed"}, "needs weights=learned"),
        ("connection", "mhc", {"num_streams": 1}, "1 / num_streams - pre_eps"),
        ("connection", "mhc", {"collapse": "sum"}, "a collapse other than sum"),
        ("connection", "mhc", {"post_scale": 1.0}, "between 0 and 1"),
        ("connection", "attention_residuals", {"start": "zero"}, "start=zero: must be one of paper, identity"),
    ):
        model = parts(**{part: option(f"model/{part}", name) | IDENTITY | settings})
        with pytest.raises(ValueError, match=message):
            depthlm.build_model(replace(base, model=replace(base.model, **model)))
