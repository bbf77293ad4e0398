"""Overrides are composed into the expected configuration."""

import re
import shutil

import hydra
import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

import depthlm
from depthlm.commands.train import read_command_line
from depthlm.config import ConfigError, compose, run_steps, warmup_steps
from depthlm.config.hydra_context import compose_raw, hydra_at_conf, open_names
from depthlm.config.keys import keys
from depthlm.config.saved import config_text
from depthlm.errors import UserError
from depthlm.locations import CONF, REPOSITORY
from depthlm.machine import environment


def test_the_default_is_vanilla_tiny_on_the_standard_library_and_overrides_are_a_list():
    config = depthlm.compose()
    assert (config.model.name, config.size.name, config.data.name) == ("vanilla", "tiny", "stdlib")
    assert config.output_dir == "outputs/default/vanilla-tiny-seed1"
    assert config.precision.name in ("fp32", "bf16")
    with pytest.raises(ConfigError, match=re.escape("must be a list, as in ['size=micro', 'seed=2']")):
        depthlm.compose("size=micro seed=2")


def test_a_run_keeps_its_precision_on_a_machine_that_computes_another_one_fast(tmp_path, monkeypatch):
    for name, device_of_run in (("old", "fp32"), ("new", "bf16")):
        monkeypatch.setattr(environment, "fast_precision", lambda *_, fast=device_of_run: fast)
        config = depthlm.compose([f"output_dir={tmp_path / name}"])
        assert config.precision.name == device_of_run
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(config_text(config))
    assert depthlm.compose([f"output_dir={tmp_path / 'old'}"]).precision.name == "bf16"
    (tmp_path / "old" / ".saved").touch()
    assert depthlm.compose([f"output_dir={tmp_path / 'old'}"]).precision.name == "fp32"
    assert depthlm.compose([f"output_dir={tmp_path / 'old'}", "precision=bf16"]).precision.name == "bf16"


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (REPOSITORY / "conf" / group).glob("*.yaml"))


# presets and sizes are composed in tests/model, experiments in test_experiments
@pytest.mark.parametrize(
    "groups", [("backbone", "data", "optimizer", "schedule"), ("deepspeed", "precision", "tracker")]
)
def test_every_option_of_every_group_composes(groups):
    if "optimizer" in groups:
        pytest.importorskip("pytorch_optimizer")
    for number in range(max(len(options(group)) for group in groups)):
        # schedule_free needs a constant schedule, and inverse_sqrt a warm-up
        chosen = {group: options(group)[(number + (group == "schedule")) % len(options(group))] for group in groups}
        texts = [f"{group}={name}" for group, name in chosen.items()]
        config = compose([*texts, "schedule.warmup_steps=3", "output_dir=any"], here=False)
        for group, name in chosen.items():
            if group not in ("deepspeed", "tracker") and name != "auto":
                assert getattr(config, group).name == name


def test_every_key_is_documented():
    assert [key.name for key in keys().values() if not key.doc] == []


def test_the_vocabulary_size_is_the_larger_of_size_and_tokenizer():
    assert depthlm.compose(["size=1.5b"]).size.vocab_size == 50304
    assert depthlm.compose(["size=micro", "data.vocab_size=5000"]).size.vocab_size == 5056
    assert depthlm.compose(["size=micro", "data.tokenizer=bytes"]).size.vocab_size == 512
    assert depthlm.compose(["size.vocab_size=60000"]).size.vocab_size == 60000


def test_an_alternative_length_or_batch_replaces_the_default():
    assert depthlm.compose(["training.batch_tokens=4096", "training.sequence_length=128"]).training.batch_size == 32
    assert depthlm.compose(["training.max_steps=10k"]).training.max_steps == 10_000
    config = depthlm.compose(["training.max_tokens=1M", "training.batch_size=4", "training.sequence_length=100"])
    assert config.training.max_steps is None
    assert run_steps(config) == 2500
    config = depthlm.compose(["schedule.warmup_steps=7"])
    assert config.schedule.warmup_ratio is None
    assert warmup_steps(config, 100) == 7


def test_flags_may_follow_overrides():
    line = read_command_line(["seed=1,2", "--multirun", "optimizer.lr=0.1", "--config-dir", "mine"])
    assert (line.multirun, line.config_dir, line.overrides) == (True, "mine", ["seed=1,2", "optimizer.lr=0.1"])
    # launchers add arguments
    assert read_command_line(["--local_rank=0", "size=micro"]).hydra == ["size=micro"]
    assert line.hydra == ["--multirun", "--config-dir", "mine", "seed=1,2", "optimizer.lr=0.1"]
    with pytest.raises(UserError, match=r"^--bogus: no such flag"):
        read_command_line(["seed=1", "--bogus", "optimizer.lr=0.1"])


def test_a_mechanism_from_config_dir_composes(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "mine.yaml").write_text(
        "defaults: [connection: residual, attention: self_attention, _self_]\nname: mine\n"
    )
    assert depthlm.compose(["model=mine"], config_dir=tmp_path).model.name == "mine"
    (tmp_path / "model/mine.yaml").write_text((tmp_path / "model/mine.yaml").read_text().replace("mine", "other"))
    assert depthlm.compose(["model=mine"], config_dir=tmp_path).model.name == "other"


def test_an_option_of_config_dir_may_set_what_the_default_configuration_sets(tmp_path):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/mine.yaml").write_text("name: mine\n_target_: torch.optim.SGD\nlr: 0.1\n")
    for given, lr in (([], 0.1), (["optimizer.lr=0.2"], 0.2)):
        assert depthlm.compose(["optimizer=mine", *given], config_dir=tmp_path).optimizer.lr == lr


def test_a_file_of_config_dir_that_hydra_would_not_read_is_named(tmp_path):
    (tmp_path / "size").mkdir()
    # a copy changes nothing
    shutil.copy(CONF / "size/micro.yaml", tmp_path / "size")
    assert depthlm.compose(["size=micro"], config_dir=tmp_path).size.num_layers == 2
    names = [tmp_path / "config.yaml", tmp_path / "size/micro.yaml"]
    for name in names:
        name.write_text("num_layers: 3\n")
    with pytest.raises(depthlm.config.ConfigError) as caught:
        depthlm.compose(["size=micro"], config_dir=tmp_path)
    reason = "depthlm has a file of this name, which Hydra reads instead; rename it"
    assert caught.value.errors == [f"{name}: {reason}" for name in names]


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["model/connection=residual", "model/attention=moda"], "moda"),
        (["model/attention=depth_attention", "model/connection=mhc"], "mhc+depth_attention"),
        (["model=dca", "model/attention=moda"], "dca,attention=moda"),
        (["model/connection=mhc", "model.name=mine"], "mine"),
    ],
)
def test_a_mechanism_is_named_after_its_parts(overrides, name):
    assert compose([*overrides, "output_dir=any"], here=False).model.name == name


@pytest.mark.parametrize(
    "overrides",
    [
        ["seed=3", "+model.connection.x=[1,{a: b}]", "training.max_tokens=10B", "deepspeed=zero2",
         "optimizer={lr: 0.1}", "++data.new.key=null"],
        ["model=dca", "size=360m", "model.connection.gate=printed", "optimizer.betas=[1,2]", "seed=${size.lr}"],
        ["experiment=depth_attention/stride", "budget=smoke", "~data.sources.dclm", "data=olmo2_mix"],
        ["size=mine", "seed=3", "+model.connection.x=1", "+new/group=a"],
    ],
)  # fmt: skip
def test_composing_the_groups_once_gives_what_hydra_gives(overrides, tmp_path):
    (tmp_path / "size").mkdir()
    shutil.copy(CONF / "size/micro.yaml", tmp_path / "size/mine.yaml")
    (tmp_path / "new/group").mkdir(parents=True)
    (tmp_path / "new/group/a.yaml").write_text("b: 1")
    folder = tmp_path if "size=mine" in overrides else None
    path = [] if folder is None else [f"hydra.searchpath=['file://{folder}']"]
    with hydra_at_conf():
        expected = hydra.compose("config", [*open_names(overrides), *path])
        for _ in range(2):
            raw = compose_raw(overrides, folder)
            assert OmegaConf.to_container(raw) == OmegaConf.to_container(expected)
            assert OmegaConf.is_struct(raw)
            OmegaConf.update(raw, "seed", 9)


@pytest.mark.parametrize("override", ["seeds=3", "size=none"])
def test_what_hydra_refuses_is_refused_when_the_groups_are_composed_once(override):
    with hydra_at_conf():
        with pytest.raises(HydraException) as expected:
            hydra.compose("config", [override])
        with pytest.raises(HydraException) as raised:
            compose_raw([override], None)
    assert str(raised.value) == str(expected.value)
