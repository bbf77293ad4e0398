"""Help on everything, a group, an option or a key; the version; shell completion."""

import os
import sys

import pytest

from depthlm.__main__ import main
from depthlm.commands.help import describe_option, print_help
from depthlm.config import mechanisms
from depthlm.config.hydra_context import available_groups
from depthlm.errors import UserError

from ..forks import environment_with


def printed(capsys: pytest.CaptureFixture[str], *topics: str) -> str:
    print_help(topics, None)
    return capsys.readouterr().out


def test_help_contains_everything_or_only_a_group_an_option_a_section_or_a_key(capsys):
    text = printed(capsys)
    for word in ("model/connection", "depth_attention/main", "training.max_steps", "run=<directory>", "Exit codes"):
        assert word in text
    text = printed(capsys, "schedule")
    assert "inverse_sqrt" in text
    assert "(the default)" in text.split("cosine")[1].splitlines()[0]
    assert "schedule.warmup_ratio" in text
    assert "optimizer.lr" not in text
    text = printed(capsys, "data=pile")
    assert "hub: monology/pile-uncopyrighted" in text
    assert "arXiv 2101.00027" in text
    assert "peak learning rate" in printed(capsys, "optimizer.lr")
    text = printed(capsys, "training")
    assert "training.max_steps" in text
    assert "data.source" not in text


def test_help_lists_an_experiment_whose_file_is_invalid(tmp_path, capsys):
    (tmp_path / "experiment/mine").mkdir(parents=True)
    (tmp_path / "experiment/mine/broken.yaml").write_text("# of mine\nexperiment: [")
    print_help(["experiment"], tmp_path)
    assert "mine/broken" in capsys.readouterr().out


def test_help_on_a_group_describes_each_of_its_options():
    for group, options in available_groups(None).items():
        assert not [option for option in options if not describe_option(group, option, None)], group


@pytest.mark.parametrize("names", [["grn_v3", "moda"], pytest.param(mechanisms(), marks=pytest.mark.slow)], ids=len)
def test_every_setting_of_a_mechanism_has_a_value_and_a_meaning(names, capsys):
    for name in names:
        lines = printed(capsys, f"model={name}").splitlines()
        assert name == "vanilla" or "arXiv" in " ".join(lines)
        settings = [
            line.split() for line in lines if line.strip().startswith(("model.connection.", "model.attention."))
        ]
        assert [cells for cells in settings if len(cells) < 4] == []
        if name == "grn_v3":
            # the value of its preset, and the default of its class
            assert ["model.connection.separate_qkv", "false", "true"] in [cells[:3] for cells in settings]


def test_an_unknown_topic_is_refused_with_a_suggestion():
    for topic, word in (("modle", "model"), ("model=dcb", "dca"), ("optimzer.lr", "optimizer.lr")):
        with pytest.raises(UserError, match=f"did you mean `{word}`"):
            print_help([topic], None)


def test_the_shell_completes_groups_and_options(forks):
    environment = environment_with(COMP_LINE="python train.py model=dep")
    done = forks.run(["train.py", "-sc", "query=bash"], environment=environment)
    assert done.stdout.split() == ["model=depth_attention"], done.stderr


def test_a_misspelt_command_or_key_gets_the_nearest_name(capsys, monkeypatch):
    for words, mistake in (
        (["generat"], "depthlm: generat: no such command; allowed: train, prepare, "),
        (["generate", "--prompt", "hi"], "--prompt: not key=value; did you mean `prompt`?"),
    ):
        monkeypatch.setattr(sys, "argv", ["depthlm", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        assert mistake in capsys.readouterr().err


def test_help_into_a_closed_pipe_ends_quietly(forks):
    reader, writer = os.pipe()
    os.close(reader)
    process = forks.start(["train.py", "--help"], stdout=writer, stderr=(error := os.memfd_create("error")))
    assert process.wait(60) == 1
    assert os.pread(error, 1000, 0) == b""
    os.close(writer)
    os.close(error)
