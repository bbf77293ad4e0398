"""Every mistake on a command line is reported on one line with the given value, the allowed values and a suggestion."""

import re

import pytest

from depthlm.__main__ import main
from depthlm.commands.train import check_command_line, read_command_line
from depthlm.config import ConfigError, compose
from depthlm.config.validate.machine import check_ranks
from depthlm.errors import UserError

from ...options import configuration
from ...ranks import rank_variables

# overrides that are right; mistakes beside them, of which each has one error; and a part of that error
BROKEN: list[tuple[str, dict[str, str]]] = [
    # single overrides. Of one key, only one value is wrong at a time
    (
        "",
        {
            "size=1.6b": "did you mean `1.5b`?",
            "deepspeed=zero9": "zero0, zero1, zero2",
            "tracker=[wandb,comet]": "tensorboard",
            "model/attention=flash": "no such model/attention",
            "experiment=table1": "no such experiment",
            "optimzer.lr=3": "no such key; did you mean `optimizer.lr`?",
            "lr=3": "did you mean `optimizer.lr`",
            "training=fast": "a group of keys",
            "+size.layers=3": "size.num_layers",
            "model.connection.streams=4": "no such key",
            "model.attention.stride=2": "no such key; allowed: none",
            "training.max_steps=many": "must be a whole number such as",
            "training.max_tokens=10X": "10B",
            "data.max_tokens={a:1}": "10B",
            "optimizer.lr=interval(1e-3,1e-2)": "write optimizer.lr=a,b",
            "optimizer.eps=1e-46": "a number, at least 1.17549",
            "optimizer.betas=0.9": "a list of numbers",
            "seed=18446744073709551616": "at most",
            "deepspeed.communication_data_type=int8": "one of auto, fp32, bf16, fp16",
            "schedule.name=cosines": "did you mean `cosine`?",
            "model.connection._target_=depthlm.mechanisms.residual.Residul": "has no Residul",
            "model.attention._target_=math.pi": "not a subclass of",
            "~optimizer": "every group has an option",
            "hydra.foo=3": "hydra.foo: no such key",
            "data.sources={}": "sets nothing",
            "+training.batch_size=3": "leave out the +",
            "training.sample='unclosed": "not an override",
            "data.source=/data/lang=en": "need quotes: \"data.source='/data/lang=en'\"",
        },
    ),
    (
        "",
        {
            "size=null": "no such size",
            "+model.connection.streams=4": "no such setting",
            "training.max_steps=0": "at least 1",
            "optimizer.lr=0": "above 0",
            "seed=-1": "at least 0",
            "model.connection._target_=nowhere.Mixer": "PYTHONPATH",
        },
    ),
    ("", {"~optimizer.lr": "a key cannot be removed", "seed=1,2": "add -m"}),
    ("", {"seed": "write key=value"}),
    # several overrides, or what is looked for if every override is valid
    (
        "",
        {
            "optimizer.betas=[0.9,1.0]": "two numbers from 0 to below 1",
            "evaluation.every=150 evaluation.sets=[a]": "multiples of 100",
            "training.keep_every=150": "training.keep_every=150: regular checkpoints",
            "deepspeed.experts=2": "backbone.mlp=swiglu has no experts",
            "size.num_kv_heads=3": "size.num_kv_heads=3: must divide size.num_heads",
            "size.head_size=7": "it must be even",
            "training.max_steps=5 training.max_epochs=3": "training.max_epochs: both given",
            "training.batch_size=8 training.batch_tokens=4096": "training.batch_tokens: both given",
            "schedule.warmup_steps=5 schedule.warmup_ratio=0.1": "schedule.warmup_ratio: both given",
            "init_from=/nowhere/at/all": "init_from=/nowhere/at/all: no checkpoint in it",
            "data.source=/nowhere/at/all": "no such folder",
            "data.tokenizer=/nowhere/tokenizer.json": "no such tokenizer.json",
            "output_dir=/dev/null/run": "not a folder",
        },
    ),
    (
        "",
        {
            "evaluation.tasks=[piqa]": "evaluation.tasks: no step is evaluated",
            "training.max_steps=null": "the run has no length",
            "training.batch_tokens=1000": "training.batch_tokens=1000: is not divisible by",
            "size.vocab_size=300": "size.vocab_size=300: ",
            "output_dir=": "empty",
            "deepspeed=zero3 training.compile=true": "training.compile=true with deepspeed.stage=3",
            "optimizer.needs_matrices=true": "needs whole matrices",
        },
    ),
    (
        "",
        {
            "evaluation.every=100": "evaluation.every=100: nothing to evaluate",
            "training.batch_size=8 training.micro_batch_size=3": "training.micro_batch_size=3: ",
            "training.max_steps=10 schedule.warmup_steps=11": "longer than the run of 10 steps",
            "deepspeed=zero2 deepspeed.offload=cpu": "deepspeed=zero3_offload",
        },
    ),
    (
        "schedule=inverse_sqrt",
        {
            "schedule.warmup_steps=0": "needs a warm-up",
            "training.activation_checkpointing=selective training.compile=true": "activation_checkpointing=selective",
        },
    ),
    ("kernels=naive", {"precision=bf16": "kernels=naive with precision=bf16: the definitions are for fp32"}),
    ("tracker=[wandb,tensorboard]", {"data=[lm1b,c4]": "no such data; allowed"}),
    ("", {"data=[lm1b,c4]": "no such data; allowed"}),
    ("data=c4", {"data.split=validation": "data.split=validation: the model would be validated on its training"}),
    (
        "data.sources.a.hub=x/y data.sources.a.weight=1 data.validation.w.source=.",
        {
            "data.validation.w.validation_files=*a": "data.validation.w.validation_files=*a: all of a validation set",
            "data.source=.": "data.sources.a.hub=x/y has text of its own",
        },
    ),
    ("", {"optimizer=ademamix optimizer.betas=[0,0.9,0.9999]": "the first and the third must be above 0"}),
    ("schedule=wsd", {"schedule.decay_ratio=0.99": "overlap", "data=local": "data.source: "}),
    (
        "backbone=qwen3_moe",
        {
            "deepspeed.experts=3": "must divide size.num_experts=8; allowed: 1, 2",
            "backbone.mlp_bias=true": "no biases",
        },
    ),
    (
        "backbone=qwen3_moe",
        {
            "optimizer=soap deepspeed.experts=2": "are of all experts",
            "deepspeed.experts=2": "the number of ranks of this run, 1",
        },
    ),
    (
        "precision=bf16 deepspeed=zero2",
        {"deepspeed.offload=cpu": "zero3_offload", "precision.fp32_residual=true": "deepspeed.stage=2"},
    ),
    ("", {"training.pipeline.chunks=2": "needs training.pipeline.stages"}),
    (
        "precision=fp32",
        {
            "training.pipeline.stages=2": "must divide the number of ranks of this run, 1; allowed: 1",
            "training.pipeline.chunks=9": "18 chunks need as many layers; allowed: stages times chunks up to 4",
            "deepspeed=zero1": "allowed: deepspeed=zero0",
            "deepspeed.communication_data_type=bf16": "allowed: auto",
            "training.log_blocks_every=5": "does not measure sublayers",
            "backbone=qwen3_moe": "which no rank has",
        },
    ),
    ("backbone=olmoe", {"deepspeed=zero3 deepspeed.experts=2": "zero0, zero1 or zero2"}),
    # found before all of these
    ("", {"training.activation_checkpointing=selectiv": "selective"}),
    ("", {"optimizer.lr=${size.lrr}": "size.lrr"}),
    ("", {"+foo=bar": "foo=bar: no such key"}),
    ("", {"fork_from=/nowhere": "fork_from=/nowhere: no checkpoint in it"}),
    ("", {"optimizer.momentum=0.9": "optimizer.momentum=0.9: torch.optim.AdamW has no such setting"}),
    # optimizers
    ("", {"+optimizer.settings.amsgrd=true": "did you mean `amsgrad`?"}),
    ("", {"optimizer.settings.fusde=true": "did you mean `optimizer.settings.fused`?"}),
    ("optimizer=muon", {"optimizer.momentun=0.9": "did you mean `optimizer.momentum`?"}),
    ("", {"+optimizer.settings.eps=1e-46": "at least 1.17549"}),
    ("", {"optimizer._target_=torch.optim.AdmW": "torch.optim has no AdmW; did you mean `AdamW`?"}),
    ("", {"optimizer._target_=torch.nn.Linear": "not a subclass of torch.optim.optimizer.Optimizer"}),
    # settings of mechanisms
    ("model=dca", {"model.connection.verion=2": "own_embedding, gate, w, separate_qkv; did you mean `version`?"}),
    ("model=dca", {"model.connection.gate=soft": "gate=soft: must be one of relu_of_sum, printed"}),
    (
        "model=attention_residuals",
        {
            "model.connection.block_size=0": "must be a whole number of at least 1",
            "model.connection.separate_qkv=0": "null, or a list of layers",
        },
    ),
    ("model=attention_residuals", {"model.connection.separate_qkv=[4]": "from 0 to 3"}),
    (
        "model=attention_residuals model.connection.routing=additive",
        {"model.connection.start=identity": "has no start"},
    ),
    ("model=mudd", {"model.connection.sources=[4]": "from 0 to 3", "model.connection.layers=0": "at least 1"}),
    ("model/connection=backout", {"model.connection.layer=9": "the layers of this decoder are 0 to 3"}),
    (
        "model=attention_residuals model.connection.values=normed",
        {"model.connection.key_norm=none": "needs key_norm=weighted or plain"},
    ),
    (
        "model=depth_attention",
        {
            "model.attention.sources=x": "model.attention.sources=x: must be",
            "model.attention.mixing=foo": "model.attention.mixing=foo: must be",
        },
    ),
    (
        "model=mhc",
        {
            "model.connection.pre_eps=-1": "must be a number of at least 0",
            "model.connection.residual=none": "must be one of sinkhorn, permutations, kronecker, identity",
            "model.connection.num_streams=1.5": "must be a whole number",
            "model.connection.collapse=x": "model.connection.collapse=x: must be",
        },
    ),
    ("model=mhc", {"model.connection.stream=4": "did you mean `num_streams`?"}),
    ("model=mhc model.connection.residual=permutations", {"model.connection.num_streams=5": "needs at most 4 streams"}),
    ("model=mhc model.connection.residual=kronecker", {"model.connection.num_streams=6": "needs a power of two"}),
    ("model=mhc_hunyuan_v4", {"model.connection.res_eps=1e-6": "res_eps=1e-06: residual=identity"}),
    ("model=shared_kv model.attention.reuse=last_k", {"model.attention.last_k=4": "must be less than the 4 layers"}),
    ("model=shared_kv", {"model.attention.last_k=2": "needs reuse=last_k"}),
    (
        "model=grn_v3",
        {
            "model.connection.separate_qkv=null": "must be true or false",
            "model.connection.version=true": "must be one of 1, 2, 3",
        },
    ),
    ("model=grn_v3", {"model.connection.own_embedding=false": "needs last_k"}),
    ("model=denseformer", {"model.connection.period=99": "the 4 layers end before"}),
    ("model=denseformer", {"model.connection.dilation=5": "no average of 4 layers"}),
    (
        "model=moda",
        {
            "model.attention.slots=0": "model.attention.slots=0: must be",
            "model.attention.ffn_kv=no_thanks": "model.attention.ffn_kv=no_thanks: must be",
        },
    ),
]


@pytest.mark.parametrize(("valid", "mistakes"), BROKEN)
def test_each_mistake_is_explained_beside_all_others(valid, mistakes):
    with pytest.raises(ConfigError) as caught:
        compose([*valid.split(), *" ".join(mistakes).split()])
    errors = caught.value.errors
    for mistake, part in mistakes.items():
        names = [name for text in mistake.split() for name in text.partition("=")[0].lstrip("+~").split(".")]
        assert any(part in error and any(name in error for name in names) for error in errors), (mistake, errors)
    assert len(errors) == len(mistakes), errors


def test_a_mechanism_validates_the_values_of_its_settings(tmp_path, monkeypatch):
    (tmp_path / "judging.py").write_text(
        "from depthlm.model.attention.self_attention import SelfAttention\n"
        "from depthlm.mechanisms.residual import Residual\n"
        "class Strided(Residual):\n"
        "    def __init__(self, spec, size, backbone, stride):\n"
        "        super().__init__(spec, size, backbone)\n"
        "        if stride < 1:\n"
        "            raise ValueError(f'stride={stride}: must be at least 1')\n"
        "class Windowed(SelfAttention):\n"
        "    def __init__(self, spec, size, backbone, window=1):\n"
        "        super().__init__(spec, size, backbone)\n"
        "        if spec.layer == size.num_layers - 1 and window > spec.layer:\n"
        "            raise ValueError(f'window={window}: only {spec.layer} layers below')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    connection = ["model.connection._target_=judging.Strided", "+model.connection.stride=2"]
    attention = ["model.attention._target_=judging.Windowed", "size.num_layers=3", "model.loops=2"]
    compose([*connection, *attention])
    with pytest.raises(ConfigError) as caught:
        compose([*connection, *attention, "model.connection.stride=0", "+model.attention.window=3", "schedule=wsd",
                 "schedule.decay_ratio=0.99"])  # fmt: skip
    assert caught.value.errors[:2] == [
        "model.connection.stride=0: must be at least 1", "model.attention.window=3: only 2 layers below"
    ]  # fmt: skip
    assert len(caught.value.errors) == 3
    with pytest.raises(ConfigError, match=r"- model\.connection: .*missing 1 required positional argument: 'stride'"):
        compose(connection[:1])


def test_a_batch_that_is_not_divisible_by_the_ranks_is_refused(monkeypatch):
    for name, value in rank_variables(0, 29500, world_size=3).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="is not divisible by the 3 ranks"):
        compose(["training.batch_size=32"])


def test_a_pipeline_needs_a_multiple_of_its_stages_of_ranks_and_micro_batches():
    given = ["size.num_layers=6", "training.pipeline.stages=3", "training.batch_size=24"]
    for ranks, micro_batch, mistake in (
        (4, 1, "number of ranks of this run, 4; allowed: 2, 4"),
        (3, None, r"micro_batch_size=null: .* 1 in 24, must be a multiple of .*; allowed: 1, 2, 4, 8"),
        (6, 3, "share of the batch, 4 in 12, .*; allowed: 1, 2, 4"),
        (6, 2, None),
    ):
        size = "null" if micro_batch is None else micro_batch
        config = configuration(*given, f"training.micro_batch_size={size}")
        errors = check_ranks(config, ranks)
        assert (errors == []) if mistake is None else re.search(mistake, "\n".join(errors)), errors


def test_compile_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("depthlm.machine.environment.device_type", lambda choice="auto": "cpu")
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        compose(["training.compile=true"])


def test_an_invalid_command_line_is_refused():
    for text in (
        "--flag", "-m seed=1,2 size=micro,tiny output_dir=x/${seed}", "--config-name=foo", "-m seed=1,2 --cfg job",
        "--config-dir=/nowhere", "hydra.run.dir=x", "-m seed=1,2 hydra.run.dir=x", "experiment=dca/depth model=dca",
    ):  # fmt: skip
        with pytest.raises(UserError):
            check_command_line(read_command_line(text.split()))


def test_an_experiment_without_m_needs_the_settings_of_a_point():
    one = ["experiment=dca/learned_weights", "budget=smoke"]
    with pytest.raises(ConfigError, match="1 point; add -m to train each, or choose one, as in model=grn_v3"):
        check_command_line(read_command_line(one))
    chooses = ["experiment=depthlm/sizes", "size=nano_60k", "model=dca", "seed=1"]
    with pytest.raises(ConfigError, match=r"or choose one, as in training.max_steps=184 optimizer.lr=\S+$"):
        check_command_line(read_command_line(chooses))
    point = check_command_line(read_command_line([*one, "model=grn_v3"]))
    assert point is not None
    assert point.model.name == "grn_v3"


def test_commands_exit_with_2_and_the_mistakes(capsys):
    for command in ("train", "summary"):
        with pytest.raises(SystemExit) as caught:
            main(command, ["size=1.6b", "optimzer.lr=1"])
        assert caught.value.code == 2
        assert "did you mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: ok\n  bad: indent\n", r"mine\.yaml, line \d+, column \d+: not valid YAML"),
        # as in an override
        ("defaults: [micro]\nnum_layers: true\n", r"size\.num_layers=true: must be an integer, at least 1"),
    ],
)
def test_a_mistake_in_a_file_of_the_user_is_reported(content, message, tmp_path):
    (tmp_path / "size").mkdir()
    (tmp_path / "size/mine.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        compose(["size=mine"], config_dir=tmp_path)
