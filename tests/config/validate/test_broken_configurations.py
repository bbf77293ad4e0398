"""Every mistake on a command line is reported on one line with the given value, the allowed values and a suggestion."""

from pathlib import Path

import pytest

from depthlm.__main__ import main
from depthlm.commands.train import check_command_line, read_command_line
from depthlm.config import ConfigError, compose
from depthlm.errors import UserError
from depthlm.sweeps import sweep_points

from ...ranks import rank_variables

# an override, and parts of the error that it alone causes
BROKEN_OVERRIDES = [
    # groups
    ("size=1.6b", ["size=1.6b", "360m", "did you mean `1.5b`?"]),
    ("size=huge", ["size=huge", "allowed: 1.5b"]),
    ("optimizer=adam", ["optimizer=adam", "did you mean `adamw`?"]),
    ("deepspeed=zero9", ["deepspeed=zero9", "zero0, zero1, zero2"]),
    ("tracker=[wandb,comet]", ["comet", "tensorboard"]),
    ("model/attention=flash", ["no such model/attention", "self_attention"]),
    ("experiment=table1", ["experiment=table1", "no such experiment"]),
    # keys
    ("optimzer.lr=3", ["optimzer.lr=3", "no such key", "did you mean `optimizer.lr`?"]),
    ("size=null", ["size=null", "no such size"]),
    ("seed=18446744073709551616", ["seed=", "at most"]),
    ("lr=3", ["lr=3", "did you mean `optimizer.lr`"]),
    ("foo=bar", ["foo=bar", "no such key"]),
    ("training=fast", ["training=fast", "a group of keys", "training.max_steps"]),
    ("model.connection.streams=4", ["model.connection.streams=4", "no such key"]),
    ("+model.connection.streams=4", ["model.connection.streams", "no such setting"]),
    # types and values
    ("training.max_steps=many", ["training.max_steps=many", "must be a whole number such as", "at least 1, or null"]),
    ("training.max_steps=0", ["training.max_steps=0", "at least 1"]),
    ("training.max_tokens=10X", ["training.max_tokens=10X", "10B"]),
    ("training.max_tokens=inf", ["training.max_tokens=inf", "10B"]),
    ("data.max_tokens={a:1}", ["data.max_tokens", "10B"]),
    ("optimizer.lr=fast", ["optimizer.lr=fast", "a number, above 0"]),
    ("optimizer.lr=true", ["optimizer.lr=true", "must be a number, above 0"]),
    ("optimizer.lr=interval(1e-3,1e-2)", ["optimizer.lr=interval(1e-3,1e-2)", "write optimizer.lr=a,b"]),
    ("+training.batch_size=3", ["+training.batch_size=3", "leave out the +"]),
    ("seed=1,2,", ["seed=1,2,", "write seed=1,2"]),
    ("optimizer.lr=0", ["optimizer.lr=0", "above 0"]),
    ("optimizer.eps=1e-46", ["optimizer.eps=1e-46", "a number, at least 1.17549"]),
    ("optimizer.betas=0.9", ["optimizer.betas=0.9", "a list of numbers"]),
    ("seed=-1", ["seed=-1", "at least 0"]),
    ("seed=null", ["seed=null", "an integer"]),
    ("deepspeed.communication_data_type=int8", ["communication_data_type=int8", "one of auto, fp32, bf16, fp16"]),
    ("resume=maybe", ["resume=maybe", "one of auto, extend, retrain, never"]),
    ("schedule.name=cosines", ["schedule.name=cosines", "did you mean `cosine`?"]),
    ("backbone.qk_norm=heads", ["backbone.qk_norm=heads", "did you mean `head`?"]),
    ("deepspeed.stage=7", ["deepspeed.stage=7", "at most 3"]),
    ("model.connection._target_=depthlm.mechanisms.residual.Residul", ["has no Residul", "`Residual`"]),
    ("model.connection._target_=nowhere.Mixer", ["cannot be imported", "PYTHONPATH"]),
    ("model.attention._target_=math.pi", ["math.pi", "not a subclass of"]),
    ("model.connection._target_=torch.nn.Linear", ["torch.nn.Linear", "connection.Connection"]),
    # overrides that Hydra would accept, or reject with an unclear message
    ("+size.layers=3", ["size.layers=3: no such key", "size.num_layers"]),
    ("~optimizer.lr", ["~optimizer.lr: a key cannot be removed"]),
    ("~optimizer", ["~optimizer: every group has an option"]),
    ("hydra.foo=3", ["hydra.foo: no such key"]),
    ("data.sources={}", ["data.sources={}: sets nothing"]),
    ("model.attention.stride=2", ["not a setting of this mechanism; model=depth_attention, model=uniform_mix have"]),
    # syntax of overrides
    ("seed", ["seed", "write key=value"]),
    ("seed=1,2", ["seed=1,2", "add -m"]),
    ("training.sample='unclosed", ["not an override"]),
    ("data.source=/data/lang=en", ["need quotes: \"data.source='/data/lang=en'\""]),
    ("data.source=été[1]", ["need quotes: \"data.source='été[1]'\""]),
]
# several overrides, or mistakes that are found only if every override is valid
BROKEN = [
    (["+foo=bar"], ["foo=bar", "no such key"]),
    (["model=mhc", "model.connection.n=4"], ["model.connection.n=4", "allowed: num_streams, iterations, collapse"]),
    (["model=mhc", "model.connection.stream=4"], ["did you mean `num_streams`?"]),
    (["optimizer.betas=[0.9]"], ["optimizer.betas=[0.9]", "two numbers"]),
    (["optimizer.betas=[0.9,1.0]"], ["optimizer.betas", "below 1"]),
    (["optimizer=muon", "optimizer.momentun=0.9"], ["optimizer.momentun=0.9", "did you mean `optimizer.momentum`?"]),
    (["optimizer.momentum=0.9"], ["optimizer.momentum=0.9: torch.optim.AdamW has no such setting"]),
    (["+optimizer.settings.eps=1e-46"], ["optimizer.settings.eps=1e-46", "at least 1.17549"]),
    (["optimizer.settings.fusde=true"], ["did you mean `optimizer.settings.fused`?"]),
    (["+optimizer.settings.amsgrd=true"], ["no such setting; allowed: betas", "did you mean `amsgrad`?"]),
    (["optimizer._target_="], ["optimizer._target_=: not a class"]),
    (["optimizer._target_=torch.optim.AdmW"], ["torch.optim has no AdmW", "did you mean `AdamW`?"]),
    (["optimizer._target_=torch.nn.Linear"], ["not a subclass of torch.optim.optimizer.Optimizer"]),
    (["training.activation_checkpointing=selectiv"], ["activation_checkpointing=selectiv", "selective"]),
    (["training.activation_checkpointing=selective", "training.compile=true"], ["activation_checkpointing=selective"]),
    (["evaluation.tasks=[piqa]"], ["evaluation.tasks: no step is evaluated", "evaluation.every=100"]),
    (["evaluation.every=100"], ["evaluation.every=100: nothing to evaluate"]),
    (["evaluation.every=150", "evaluation.sets=[a]"], ["evaluation.every=150", "multiples of 100"]),
    (["training.keep_every=150"], ["keep_every=150", "training.checkpoint_every=100", "multiples of 100"]),
    (["fork_from=/nowhere"], ["fork_from=/nowhere: no checkpoint in it"]),
    (["output_dir="], ["output_dir=", "empty"]),
    (["deepspeed=zero2", "deepspeed.offload=cpu"], ["deepspeed.offload=cpu", "deepspeed=zero3_offload"]),
    (["deepspeed.experts=2"], ["deepspeed.experts=2: backbone.mlp=", "has no experts"]),
    (["precision=bf16", "deepspeed=zero1", "precision.fp32_residual=true"], ["deepspeed.stage=1", "deepspeed=zero0"]),
    (["backbone=qwen3_moe", "deepspeed.experts=3"], ["deepspeed.experts=3: must divide size.num_experts=8", "1, 2"]),
    (["backbone=olmoe", "deepspeed=zero3", "deepspeed.experts=2"], ["deepspeed.stage=3", "zero0, zero1 or zero2"]),
    (["model=dca", "model.connection.gate=soft"], ["model.connection.gate=soft: must be one of relu_of_sum, printed"]),
    (["model=attention_residuals", "model.connection.block_size=0"], ["model.connection.block_size=0: must be"]),
    (["model=attention_residuals", "model.connection.key_norm=foo"], ["key_norm=foo: must be one of weighted,"]),
    (["model=attention_residuals", "model.connection.separate_qkv=[4]"], ["separate_qkv=[4]", "from 0 to 3"]),
    (["model=attention_residuals", "model.connection.separate_qkv=0"], ["separate_qkv=0", "null, or a list of layers"]),
    (
        ["model=attention_residuals", "model.connection.values=normed", "model.connection.key_norm=none"],
        ["values=normed", "needs key_norm=weighted or plain"],
    ),
    (["model=mhc", "model.connection.pre_eps=-1"], ["pre_eps=-1: must be a number of at least 0"]),
    (["model=mhc", "model.connection.residual=none"], ["residual=none: must be one of sinkhorn, identity"]),
    (["model=mhc_hunyuan_v4", "model.connection.res_eps=1e-6"], ["res_eps=1e-06: residual=identity"]),
    (
        ["model=shared_kv", "model.attention.reuse=last_k", "model.attention.last_k=4"],
        ["last_k=4: must be less than the 4 layers"],
    ),
    (["model=shared_kv", "model.attention.last_k=2"], ["last_k=2: needs reuse=last_k"]),
    (["model=gated_residual", "model.connection.temperature=0"], ["temperature=0: must be a number of at least 1e-06"]),
    (["model=grn_v3", "model.connection.separate_qkv=null"], ["separate_qkv=null: must be true or false"]),
    (["model=grn_v3", "model.connection.version=true"], ["version=true: must be one of 1, 2, 3"]),
    (["model=grn_v3", "model.connection.own_embedding=false"], ["own_embedding=false: needs last_k"]),
    (["model=mhc", "model.connection.num_streams=1.5"], ["num_streams=1.5: must be a whole number"]),
    (["model=laurel", "model.connection.rank=null"], ["rank=null: must be a whole number"]),
    (["model=denseformer", "model.connection.period=99"], ["period=99: the 4 layers end before"]),
    (["model=hyper_connections", "model.connection.dynamic=1"], ["dynamic=1: must be true or false"]),
    (["optimizer.lr=${size.lrr}"], ["optimizer.lr", "size.lrr"]),
    (["model=dca", "model.connection.period=2"], ["model=denseformer have `period`"]),
    (["model=denseformer", "model.connection.dilation=5"], ["dilation=5: no average of 4 layers"]),
    (["data=local"], ["data.source", "needs text"]),
    # across fields
    (["size.num_kv_heads=3"], ["size.num_kv_heads=3", "must divide", "size.num_heads"]),
    (["size.head_size=7"], ["size.head_size=7", "even"]),
    (["size.vocab_size=300"], ["size.vocab_size=300", "needs"]),
    (["training.max_steps=5", "training.max_tokens=1M"], ["both given"]),
    (["training.max_steps=null"], ["the run has no length"]),
    (["training.batch_size=8", "training.batch_tokens=4096"], ["both given"]),
    (["training.batch_tokens=1000"], ["training.batch_tokens=1000", "is not divisible by"]),
    (["training.batch_size=8", "training.micro_batch_size=3"], ["training.micro_batch_size=3", "allowed: 1, 2, 4, 8"]),
    (["training.max_steps=10", "schedule.warmup_steps=11"], ["longer than the run of 10 steps"]),
    (["schedule.warmup_steps=5", "schedule.warmup_ratio=0.1"], ["both given"]),
    (["schedule=inverse_sqrt", "schedule.warmup_steps=0"], ["needs a warm-up"]),
    (["schedule=wsd", "schedule.decay_ratio=0.99"], ["overlap"]),
    (["optimizer.needs_matrices=true", "deepspeed=zero3"], ["needs whole matrices", "deepspeed=zero0"]),
    (["training.compile=true", "deepspeed=zero3"], ["training.compile=true with deepspeed.stage=3", "allowed"]),
    (["init_from=/nowhere/at/all"], ["init_from=/nowhere/at/all", "no checkpoint in it"]),
    (["data.source=/nowhere/at/all"], ["data.source=/nowhere/at/all", "no such folder"]),
    (["data.tokenizer=/nowhere/tokenizer.json"], ["data.tokenizer=/nowhere/tokenizer.json", "no such tokenizer.json"]),
    (["output_dir=/dev/null/run"], ["output_dir=/dev/null/run", "not a folder"]),
]


# the mistakes in one override are reported together, so they are made together
TOGETHER = 12


@pytest.mark.parametrize("start", range(0, len(BROKEN_OVERRIDES), TOGETHER))
def test_a_broken_override_is_explained_on_one_line(start: int) -> None:
    cases = BROKEN_OVERRIDES[start : start + TOGETHER]
    with pytest.raises(ConfigError) as caught:
        compose([override for override, _ in cases])
    errors = caught.value.errors
    assert len(errors) == len(cases), errors
    for override, words in cases:
        explained = [error for error in errors if all(word in error for word in words)]
        assert explained, (override, errors)
        errors.remove(explained[0])


@pytest.mark.parametrize(("overrides", "words"), BROKEN, ids=lambda value: " ".join(value)[:60])
def test_a_broken_configuration_is_explained(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    text = "\n".join(caught.value.errors)
    for word in words:
        assert word in text, text
    assert len(caught.value.errors) == 1, text


@pytest.mark.parametrize(
    "overrides",
    [
        ["size=1.6b", "optimzer.lr=1", "training.max_steps=x", "schedule.warmup_ratio=7", "resume=no"],
        # across fields
        ["size.num_kv_heads=3", "training.micro_batch_size=7", "schedule.warmup_steps=9999", "size.vocab_size=9"],
    ],
)
def test_all_errors_are_reported_together(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    assert len(caught.value.errors) == len(overrides)


def test_a_mechanism_validates_the_values_of_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "judging.py").write_text(
        "from depthlm.model.attention.self_attention import SelfAttention\n"
        "from depthlm.mechanisms.residual import Residual\n"
        "class Strided(Residual):\n"
        "    def __init__(self, spec, size, backbone, stride, last=None):\n"
        "        super().__init__(spec, size, backbone)\n"
        "        if stride < 1:\n"
        "            raise ValueError(f'stride={stride}: must be at least 1')\n"
        "        if last == spec.kind:\n"
        "            raise ValueError('cannot be ' + last)\n"
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
    with pytest.raises(ConfigError, match=r"- model\.connection: cannot be final"):
        compose([*connection, "+model.connection.last=final"])
    with pytest.raises(ConfigError, match=r"- model\.connection: .*missing 1 required positional argument: 'stride'"):
        compose(connection[:1])
    with pytest.raises(ConfigError, match=r"- model\.connection: '<' not supported"):
        compose([*connection, "model.connection.stride=few"])


def test_a_batch_that_is_not_divisible_by_the_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rank_variables(0, 29500, world_size=3).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="is not divisible by the 3 ranks"):
        compose(["training.batch_size=32"])


def test_compile_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("depthlm.machine.environment.device_type", lambda choice="auto": "cpu")
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        compose(["training.compile=true"])


def test_an_invalid_command_line_is_refused() -> None:
    for text in (
        "--flag", "-m seed=1,2 output_dir=x", "-m size=tiny,hug", "-m seed=1,2 size=micro,tiny output_dir=x/${seed}",
        "--config-name=foo", "--resolve", "-m seed=1,2 --cfg job", "--info --run", "--config-dir=/nowhere",
        "hydra.run.dir=x", "hydra.job.chdir=true", "-m seed=1,2 hydra.run.dir=x", "experiment=dca/depth",
        "experiment=dca/depth model=dca", "-m run=outputs/default/base seed=1,2",
    ):  # fmt: skip
        with pytest.raises(UserError):
            check_command_line(read_command_line(text.split()))


def test_commands_exit_with_2_and_the_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("train", "summary"):
        with pytest.raises(SystemExit) as caught:
            main(command, ["size=1.6b", "optimzer.lr=1"])
        assert caught.value.code == 2
        assert "did you mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=depth_attention", "model.attention.stride=0", "model.attention.sources=x",
         "model.attention.mixing=foo"],
        ["model=mhc", "model.connection.iterations=null", "model.connection.collapse=x"],
        ["model=moda", "model.attention.slots=0", "model.attention.ffn_kv=no_thanks"],
    ],
)  # fmt: skip
def test_all_mistakes_of_a_mechanism_are_reported_together(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    assert len(caught.value.errors) == len(overrides) - 1
    for override in overrides[1:]:
        assert any(error.startswith(f"{override}: must be") for error in caught.value.errors)


def test_a_single_point_of_an_experiment_needs_no_multirun_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    for point in sweep_points(["experiment=dca/depth", "budget=smoke"])[:3]:
        check_command_line(read_command_line(point.overrides))


@pytest.mark.parametrize("content", ["name: [unclosed", "name: ok\n  bad: indent\n", "name: \tx: 3\n"])
def test_a_broken_file_of_the_user_is_reported_with_its_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"mine\.yaml, line \d+, column \d+: not valid YAML"):
        compose(["model=mine"], config_dir=tmp_path)


def test_true_for_a_number_in_a_file_is_a_mistake_as_in_an_override(tmp_path: Path) -> None:
    (tmp_path / "size").mkdir()
    (tmp_path / "size/mine.yaml").write_text("defaults: [micro]\nnum_layers: true\n")
    with pytest.raises(ConfigError, match=r"size\.num_layers=true: must be an integer, at least 1"):
        compose(["size=mine"], config_dir=tmp_path)
