"""The names of runs."""

import re
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import depthlm
from depthlm.config import ConfigError, compose
from depthlm.config.keys import keys
from depthlm.config.names import (
    LONGEST,
    normal_value,
    run_name,
    short_key,
)
from depthlm.config.saved import compare
from depthlm.sweeps import sweep_points


def named(*overrides: str) -> str:
    """Return the name of the run of a command."""
    return Path(compose(overrides, here=False).output_dir or "").name


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "vanilla-tiny-seed1"),
        (["optimizer.lr=1e-3", "model=mhc", "seed=2"], "mhc-tiny-seed2-lr1e-3"),
        (["model/connection=mhc", "model/attention=moda"], "mhc+moda-tiny-seed1"),
        (
            ["model=mhc", "model.connection.num_streams=2", "optimizer.betas=[0.9, 0.9]"],
            "mhc-tiny-seed1-connection.num_streams2-betas0.9-0.9",
        ),
        (["budget=smoke", "optimizer=muon", "data=pile"], "vanilla-tiny-seed1-muon-pile-smoke"),
        (["data=local", "data.source='my texts'"], "vanilla-tiny-seed1-local-source-my-texts-"),
        (["init_from=runs/base"], "vanilla-tiny-seed1-init_from-base-"),
        # what has no effect on the result
        (["size=micro", "training.log_every=3", "tracker=none", "training.stop_after=4"], "vanilla-micro-seed1"),
        # what the configuration has without it
        (["optimizer.lr=0.0030", "training.sequence_length=256", "training.max_steps=600"], "vanilla-tiny-seed1"),
        (["optimizer.betas=[0.9,0.95]", "optimizer=adamw", "budget=paper", "deepspeed=zero0"], "vanilla-tiny-seed1"),
        # the default only where another override is, or without a budget
        (["size.lr=1e-3", "optimizer.lr=3e-3"], "vanilla-tiny-seed1-lr3e-3-size.lr1e-3"),
        (["budget=smoke", "training.max_steps=600"], "vanilla-tiny-seed1-max_steps600-smoke"),
        # what follows from another override, or from the budget
        (["size.lr=1e-2", "optimizer.lr=1e-2"], "vanilla-tiny-seed1-size.lr0.01"),
        # one length replaces the other
        (["training.max_steps=null", "training.max_tokens=1M"], "vanilla-tiny-seed1-max_tokens1M"),
    ],
)
def test_a_name_has_mechanism_size_and_seed_and_then_what_differs(overrides, name):
    found = named(*overrides)
    assert found == named(*overrides[::-1]) == Path(sweep_points(overrides)[0].directory).name
    assert re.sub(r"(?<=-)[0-9a-f]{6}$", "", found) == name


# settings that interpolations, the budget and alternatives connect, with their defaults and other values
CHOICES = {
    "size": ["micro", "tiny"], "optimizer": ["adamw", "ademamix"], "optimizer.lr": ["3e-3", "0.003", "1e-3"],
    "size.lr": ["3e-3", "1e-3"], "budget": ["paper", "smoke"], "training.max_steps": ["600", "40"],
    "training.batch_size": ["8", "4"], "size.hidden_size": ["64", "128"], "schedule": ["cosine", "wsd"],
    "schedule.decay_ratio": ["0.2", "0.3"], "seed": ["1", "2"], "precision": ["fp32", "auto"],
    "data": ["stdlib", "pile"], "parametrization": ["standard", "mup parametrization.base_size=tiny"],
}  # fmt: skip


COMMANDS = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in CHOICES.items()})


@settings(max_examples=1)
@given(st.lists(COMMANDS, min_size=6, max_size=6))
def test_two_commands_have_one_directory_if_and_only_if_their_runs_are_equal(commands):
    runs = [
        compose(" ".join(f"{name}={value}" for name, value in command.items()).split(), here=False)
        for command in commands
    ]
    for one, other in combinations(runs, 2):
        assert (one.output_dir == other.output_dir) == (not compare(asdict(one), asdict(other)))


def test_names_that_are_too_long_or_ambiguous_end_in_a_hash():
    here, there = (named("data=local", f"data.source={folder}/texts") for folder in ("/here", "/there"))
    assert here.startswith("vanilla-tiny-seed1-local-source-texts-")
    assert len({here, there}) == 2
    long = [f"data.validation.v{number}.source=texts" for number in range(9)]
    names = {named(*long[:count]) for count in range(0, 10, 3)}
    assert len(names) == 4
    assert max(map(len, names)) <= LONGEST


@given(st.lists(st.tuples(st.sampled_from(["0.1", "0.2"]), st.text(max_size=80)), min_size=2, max_size=2, unique=True))
@example([("0.1", ""), ("0.1", ",")])
@example([("0.1", "1"), ("0.1", "[1]")])
def test_different_settings_have_different_names(pairs):
    config = compose(here=False)
    names = {run_name(replace(config, differences={"optimizer.lr": lr, "data.source": source})) for lr, source in pairs}
    assert len(names) == 2
    assert all(len(name) <= LONGEST and "/" not in name and name.isprintable() for name in names)


def test_every_key_has_a_short_name_of_its_own():
    short = {short_key(name) for name in keys()}
    assert len(short) == len(keys())
    wanted = {"optimizer.lr": "lr", "training.max_steps": "max_steps", "data.source": "source", "size.lr": "size.lr"}
    assert {name: short_key(name) for name in wanted} == wanted
    assert short_key("model.connection.n") == "connection.n"


def test_a_number_has_the_same_text_in_every_spelling():
    for text, spellings in {
        "1e-3": ("0.001", "1e-3", "1E-03", "0.0010", "1.0e-3"),
        "0.1": ("0.1", "1e-1", "0.10", ".1"),
        "3e-5": ("3e-05", "0.00003"),
        "10B": ("10B", "10_000_000_000", "10000M"),
        "1": ("1.0",),
    }.items():
        assert {normal_value("optimizer.lr", value) for value in spellings} == {text}


def test_text_stays_as_it_was_given_also_in_a_named_source():
    assert {normal_value(f"data.{of}subset", "'1.10'") for of in ("", "sources.web.", "validation.web.")} == {"1.10"}
    data = compose(["data=stdlib", "data.validation.web.hub=a/b", "data.validation.web.subset=2024_01"]).data
    assert data.validation["web"].subset == "2024_01"


def test_a_point_is_named_by_what_its_experiment_does_not_have_without_it(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(
        "# @package _global_\ndefaults: [depthlm/_protocol, override /size: nano_160k, _self_]\n"
        "experiment: {points: [{model: vanilla, optimizer.lr: [8.5e-3, 1.7e-2], seed: [1, 2]}]}\n"
    )
    points = sweep_points(["experiment=mine", "optimizer.betas=[0.9,0.95]"], tmp_path)
    folders = [Path(point.directory).name for point in points]
    assert {"vanilla-nano_160k-seed1-lr0.0085", "vanilla-nano_160k-seed1"} < {*folders}
    assert len({*folders}) == len(points)
    assert not any("betas" in folder for folder in folders)


def test_a_run_may_be_named():
    config = depthlm.compose(["name='${model.name}, seed ${seed}'", "model=mhc"])
    assert (config.name, config.output_dir) == ("mhc, seed 1", "outputs/default/mhc, seed 1")
    assert depthlm.compose(["name=mine", "output_dir=there"]).output_dir == "there"
    for name in ("a/b", "..", "''"):
        with pytest.raises(ConfigError, match="must be the name of a folder"):
            depthlm.compose([f"name={name}"])
    for text in ("name=wandb", "name=.slurm", "name=.mine", "output_dir=there/wandb"):
        with pytest.raises(ConfigError, match="`runs` lists no folder of this name"):
            depthlm.compose([text])
    for text in (f"name={'x' * 300}", f"output_dir=there/{'x' * 240}/here", f"output_dir={'x/' * 2000}"):
        with pytest.raises(ConfigError, match=r"\.\.\.: too long for a folder; allowed: 200 bytes"):
            depthlm.compose([text])
    assert depthlm.compose(["output_dir=wandb/there"]).output_dir == "wandb/there"
