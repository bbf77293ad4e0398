"""Rates that transfer: the factors equal the released code's, and training with them equals factors in the model."""

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import depthlm
from depthlm.config import ConfigError
from depthlm.config.schema import Config
from depthlm.config.validate.decoder import check_parametrization
from depthlm.locations import CONF
from depthlm.model import Decoder
from depthlm.model.parameters import Factors
from depthlm.model.shape import Parametrization, Size
from depthlm.optimizers.build import build_optimizer, parameter_groups

from .. import options
from ..options import option
from .conftest import PRESETS, configuration

# twice as wide as nano_60k, three times as deep, with heads twice as wide
WIDE = ["size=nano_60k", "size.hidden_size=64", "size.intermediate_size=176", "size.head_size=16", "size.num_layers=12",
        "data.tokenizer=bytes", "precision=fp32", "parametrization.base_size=nano_60k"]  # fmt: skip
WIDTH, DEPTH = 2.0, 3.0
# presets without a factor of the outputs
UNDEFINED = ["altup", "attention_residuals_inkling2", "gated_residual", "mudd", "unet_skip"]


def composed(*overrides: str) -> Config:
    return options.configuration(*WIDE, *overrides)


def nanogpt(name: str, complete: bool) -> Factors:
    """The factors of parameters in model.py of github.com/EleutherAI/nanoGPT-mup, branches mup and completep.

    Their `adam_eps` is one number, `depth_alpha_exp` is 1. Factors of outputs are in `output_factor`.
    """
    width_lr_scaling, depth_lr_scaling = 1 / WIDTH, 1.0
    eps = 1 / WIDTH / DEPTH if complete else 1.0
    is_hidden_weight = "proj.weight" in name
    if is_hidden_weight and complete:
        return Factors(1 / math.sqrt(WIDTH), width_lr_scaling * depth_lr_scaling, 1 / width_lr_scaling, eps)
    if is_hidden_weight:
        return Factors(1 / math.sqrt(WIDTH), width_lr_scaling, 1.0, eps)
    return Factors(1.0, 1.0, 1.0, eps)


def output_factor(name: str, complete: bool) -> float:
    """What that code multiplies the result of a module by: logits, scores relative to 1 / sqrt(e), and branches."""
    if name.startswith("final_norm"):
        return 1 / WIDTH
    if "q_norm" in name:
        return (1 / 16) / (1 / math.sqrt(16)) * math.sqrt(8)
    if "o_proj" in name or "down_proj" in name:
        return 1 / DEPTH if complete else 1.0
    return 1.0


@pytest.mark.parametrize("complete", [False, True])
def test_the_factors_of_vanilla_are_those_of_the_released_code(complete):
    config = composed(f"parametrization={'completep' if complete else 'mup'}", "backbone.norm=layernorm")
    model = depthlm.build_model(config, "meta")
    for name, _ in model.named_parameters():
        theirs, c = nanogpt(name, complete), output_factor(name, complete)
        expected = theirs.init * c, theirs.lr * c, theirs.weight_decay / c, theirs.eps / c
        torch.testing.assert_close(tuple(model.factors[name]), expected, rtol=1e-12, atol=0, msg=name)


@pytest.mark.parametrize("name", ["mup", "completep"])
def test_training_equals_that_of_a_model_with_factors_of_outputs(name):
    complete = name == "completep"
    config = composed(f"parametrization={name}", "size.num_layers=3", "optimizer.eps=1e-4")
    depth = 3 / 4 if complete else 1.0
    ours = depthlm.build_model(config).double()
    theirs = depthlm.build_model(replace(config, parametrization=Parametrization())).double()
    of_outputs = {"final_norm": 1 / WIDTH, "q_norm": math.sqrt(8 / 16), "o_proj": 1 / depth, "down_proj": 1 / depth}
    factors = {path: of_outputs.get(path.rpartition(".")[2], 1.0) for path, _ in theirs.named_modules()}
    groups: list[dict[str, Any]] = []
    for name, parameter in theirs.named_parameters():
        path, of_ours = name.removesuffix(".weight"), ours.get_parameter(name)
        is_hidden = isinstance(theirs.get_submodule(path), nn.Linear)
        initial = (WIDTH**-0.5 if is_hidden else 1.0) * parameter
        with torch.no_grad():
            # initial values are those of fp32
            torch.testing.assert_close(of_ours, factors[path] * initial, rtol=1e-6, atol=0)
            parameter.copy_(of_ours / factors[path])
        decay = config.optimizer.weight_decay if parameter.ndim > 1 else 0.0
        groups.append(
            {
                "params": [parameter],
                "lr": config.optimizer.lr * (1 / WIDTH if is_hidden else 1.0),
                "weight_decay": decay * (WIDTH if is_hidden and complete else 1.0),
                "eps": config.optimizer.eps * (1 / WIDTH / depth if complete else 1.0),
            }
        )
    for path, module in theirs.named_modules():
        module.register_forward_hook(lambda _module, _inputs, output, c=factors[path]: output if c == 1 else c * output)
    optimizers = (
        build_optimizer(ours, replace(config.optimizer, settings={})),
        torch.optim.AdamW(groups, betas=tuple(config.optimizer.betas)),
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        tokens = torch.randint(300, (2, 17), generator=generator)
        found = []
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            found.append(mean_loss(model, tokens))
            found[-1].backward()
            optimizer.step()
        torch.testing.assert_close(*found, rtol=1e-11, atol=0)


def parametrized(config: Config, name: Literal["mup", "completep"], base: Size) -> Config:
    return replace(config, parametrization=Parametrization(name, base))


def mean_loss(model: Decoder, tokens: Tensor) -> Tensor:
    return model(tokens[:, :-1], tokens[:, 1:]).nll / tokens[:, 1:].numel()


@pytest.mark.parametrize("preset", PRESETS)
def test_at_the_base_size_nothing_changes(preset):
    standard = configuration(f"model={preset}", "size.num_layers=2")
    scaled = parametrized(standard, "mup" if preset in UNDEFINED else "completep", standard.size)
    plain, other = (depthlm.build_model(config) for config in (standard, scaled))
    assert all(factors == Factors() for factors in other.factors.values())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))
    groups = [parameter_groups(model, standard.optimizer) for model in (plain, other)]
    without_tensors = [[{**group, "params": None} for group in of_model] for of_model in groups]
    assert without_tensors[0] == without_tensors[1]
    tokens = torch.randint(300, (2, 17), generator=torch.Generator().manual_seed(0))
    assert torch.equal(*(mean_loss(model, tokens) for model in (plain, other)))


# what each connection has: how the factor of the rate of each parameter follows the width (w) and depth (d), and how
# that of its initial values follows the width; and the factor of the outputs
NOTHING = (0.0, 0.0, 0.0)
MATRIX = (-1.0, 0.0, -0.5)
CONNECTIONS: dict[str, tuple[float, dict[str, tuple[float, float, float]]]] = {
    "residual": (-1, {}),
    "rezero": (-1, {"alpha": NOTHING}),
    "embedding_skip": (-1, {"weight": (0.0, -1.0, 0.0)}),
    "backout": (-1, {"weight": NOTHING}),
    "wide_residual": (-1, {"read_logits": NOTHING, "write_logits": NOTHING}),
    "laurel": (-1, {"down": MATRIX, "up": (0.0, -1.0, 0.0), "gamma": NOTHING}),
    "denseformer": (-1, {"a": (0.0, -2.0, 0.0)}),
    "dca": (-1, {"b": NOTHING, "w": MATRIX}),
    "attention_residuals": (-1, {"query": MATRIX, "key_norm": NOTHING}),
    "attention_residuals_recency": (-1, {"query": MATRIX, "key_norm": NOTHING, "recency": NOTHING}),
    "depth_dense": (-1, {"proj.weight": MATRIX}),
    # heads twice as wide: scores are divided by the root of 2 once more
    "depth_qkv": (-1, {"q_proj.weight": (-1.5, 0.0, -1.0), "k_proj.weight": MATRIX, "v_proj.weight": MATRIX}),
    "hyper_connections": (-1, {
        "static_pre": NOTHING, "static_post": NOTHING, "static_res": (0.0, -1.0, 0.0), "w": (-1.0, -1.0, -0.5),
        "scale": (0.0, -1.0, 0.0),
    }),
    "mhc": (-1, {"norm": NOTHING, "phi": MATRIX, "alpha": NOTHING, "bias": NOTHING}),
    "qwen4_exp": (-1, {"norm": NOTHING, "down.weight": MATRIX, "up.weight": NOTHING, "inject.weight": MATRIX}),
}  # fmt: skip
OTHERS = sorted({path.stem for path in (CONF / "model/connection").glob("*.yaml")} - CONNECTIONS.keys())


def widened(*overrides: str) -> Config:
    """The configuration of a model that is twice as wide and three times as deep as its base size, with more heads."""
    of_base = configuration("size.num_layers=4", *overrides)
    size = replace(of_base.size, hidden_size=64, intermediate_size=96, head_size=16, num_layers=12)
    return parametrized(replace(of_base, size=size), "completep", of_base.size)


@pytest.mark.parametrize("name", CONNECTIONS)
def test_the_factors_of_a_connection_follow_width_and_depth(name):
    depth_of_outputs, parameters = CONNECTIONS[name]
    config = widened(f"model/connection={name}")
    assert check_parametrization(config) == []
    model = depthlm.build_model(config, "meta")
    own = {key.split(".", 2)[2]: factors for key, factors in model.factors.items() if key.startswith("connections.")}
    assert own.keys() == parameters.keys()
    for key, (of_width, of_depth, initial) in parameters.items():
        assert own[key].lr == pytest.approx(WIDTH**of_width * DEPTH**of_depth), key
        assert own[key].init == pytest.approx(WIDTH**initial), key
    output = model.factors["layers.0.mlp.down_proj.weight"]
    assert output.lr == pytest.approx(DEPTH**depth_of_outputs / WIDTH)


def test_completep_is_refused_where_depth_means_nothing():
    assert "mudd" in OTHERS
    refused = [f"model/connection={name}" for name in OTHERS]
    refused.append("model/connection=attention_residuals model.connection.values=normed")
    for overrides in [*refused, "backbone=olmo2"]:
        (error,) = check_parametrization(widened(*overrides.split()))
        assert "not defined for" in error, overrides
        assert error.endswith("parametrization=mup needs no depth")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["backbone=kimi_linear"], {"layers.0.attention.q_proj.weight": -1.0, "layers.1.mlp.router.weight": -1.0}),
        (["backbone=qwen3_moe"], {"layers.0.mlp.experts.up_proj": -1.0, "layers.0.attention.q_norm.weight": -0.5}),
        (["backbone.tie_embeddings=true"], {"embedding.weight": 0.0, "final_norm.weight": -1.0}),
        (["model/connection=attention_residuals", "model.connection.scale=true"], {"connections.3.query": -0.5}),
        (["model/connection=attention_residuals", "model.connection.query=input_dependent"],
         {"connections.3.query_proj.weight": -2.0}),
        (["model.loops=2"], {"layers.0.attention.v_proj.weight": -1.0}),
    ],
)  # fmt: skip
def test_the_rates_of_other_parts_follow_the_width(overrides, expected):
    model = depthlm.build_model(widened(*overrides), "meta")
    for name, exponent in expected.items():
        assert model.factors[name].lr == pytest.approx(WIDTH**exponent), name


# connections, further settings, attentions and backbones for which CompleteP is defined
QUICK = [f"model/connection={name}" for name in ("residual", "attention_residuals", "denseformer", "hyper_connections")]
VARIANTS = [
    *sorted({f"model/connection={name}" for name in CONNECTIONS} - {*QUICK}),
    "model/connection=attention_residuals model.connection.block_size=1",
    "model/connection=attention_residuals model.connection.block_size=1 model.connection.window=2",
    "model/connection=attention_residuals model.connection.query=input_dependent",
    "model/connection=attention_residuals model.connection.mixing=sigmoid",
    "model/connection=dca model.connection.last_k=2",
    "model/connection=attention_residuals model.connection.routing=additive",
    "model/connection=gated_residual model.connection.form=token",
    "model/connection=mhc model.connection.start=zero",
    *(f"model/attention={path.stem}" for path in sorted((CONF / "model/attention").glob("*.yaml"))),
    "model.loops=2",
    "backbone=kimi_linear",
    "backbone=qwen3_moe",
]


@pytest.mark.parametrize("overrides", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in VARIANTS)])
def test_the_change_of_the_hidden_state_does_not_follow_the_depth(overrides):
    shallow, deep = 4, 32
    config = options.configuration(
        *WIDE[:1], *WIDE[-3:-1], f"size.num_layers={shallow}", "optimizer.lr=3e-3", *overrides.split()
    )
    changes = []
    for layers in (shallow, deep):
        sized = replace(config, size=replace(config.size, num_layers=layers))
        model = depthlm.build_model(parametrized(sized, "completep", config.size))
        optimizer = build_optimizer(model, config.optimizer)
        # few tokens, so that their loss changes
        first, second = torch.randint(16, (2, 4, 17), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            before = model.hidden(first[:, :-1])
        for batch in (first, second):
            optimizer.zero_grad()
            mean_loss(model, batch).backward()
            optimizer.step()
        with torch.no_grad():
            changes.append(((model.hidden(first[:, :-1]) - before).norm() / before.norm()).item())
    assert abs(math.log(changes[1] / changes[0], deep / shallow)) < 0.15


def test_the_rate_and_the_initial_values_are_those_of_the_base_size():
    base = option("size", "nano_60k")
    config = depthlm.compose(["size=nano_330k", "parametrization=mup", "parametrization.base_size=nano_60k"])
    assert (config.optimizer.lr, config.size.init_std) == (base["lr"], base["init_std"])
    assert config.size.embedding_init_std == base["embedding_init_std"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parametrization=mup"], "give parametrization.base_size"),
        (["parametrization.base_size=micro"], "has no base_size"),
        (["parametrization=mup", "parametrization.base_size=micro", "optimizer=muon"], "those of AdamW, and not of"),
        (["parametrization=mup", "parametrization.base_size=micro", "backbone.init=xavier_uniform"], "xavier_uniform"),
    ],
)
def test_a_parametrization_without_known_factors_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        depthlm.compose(overrides)


def test_a_broken_file_of_a_base_size_is_reported(tmp_path):
    (tmp_path / "size").mkdir()
    (tmp_path / "size/mine.yaml").write_text("name: mine\nhidden_size: [1\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml, line 3, .*not valid YAML"):
        depthlm.compose(["parametrization=mup", "parametrization.base_size=mine"], tmp_path)
