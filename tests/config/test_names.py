"""The names of runs."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import depthlm
from depthlm.config import ConfigError, compose_anywhere
from depthlm.config.keys import keys
from depthlm.config.names import (
    DEFAULTS,
    LONGEST,
    Leading,
    normal_value,
    report_name,
    run_name,
    setting_text,
    setting_texts,
    short_key,
)
from depthlm.config.resolve import leading, run_directory
from depthlm.config.saved import compare
from depthlm.sweeps import sweep_points


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "vanilla-tiny-seed1"),
        (["seed=2", "size=1.5b"], "vanilla-1.5b-seed2"),
        (["optimizer.lr=1e-3", "model=mhc", "seed=2"], "mhc-tiny-seed2-lr1e-3"),
        (["model/connection=mhc", "model/attention=moda"], "mhc+moda-tiny-seed1"),
        (["model=dca", "model.connection.num_streams=2"], "dca-tiny-seed1-connection.num_streams2"),
        (["budget=smoke", "optimizer=muon", "data=pile"], "vanilla-tiny-seed1-muon-pile-smoke"),
        (["optimizer.betas=[0.9,0.95]"], "vanilla-tiny-seed1-betas0.9-0.95"),
        (["data.source='my texts'"], "vanilla-tiny-seed1-source-my-texts-"),
        (["size.tied_embeddings=true"], "vanilla-tiny-seed1-tied_embeddings-true"),
    ],
)
def test_a_name_has_mechanism_size_and_seed_and_then_what_differs(overrides: list[str], name: str) -> None:
    assert run_name(overrides) == run_name(overrides[::-1])
    assert re.sub(r"(?<=-)[0-9a-f]{6}$", "", run_name(overrides)) == name


def test_a_name_omits_overrides_that_do_not_affect_the_result() -> None:
    silent = ["output_dir=x", "training.log_every=3", "tracker=none", "training.stop_after=4"]
    assert run_name(["size=micro", *silent, "training.checkpoint_every=9"]) == "vanilla-micro-seed1"


def test_a_report_on_a_choice_has_a_folder_of_its_own() -> None:
    sweep = ["model=vanilla,mhc", "optimizer.lr=1e-3,2e-3"]
    assert report_name([*sweep, "experiment.title=Rates"]) == report_name(sweep) == "report-vanilla-mhc-lr1e-3-2e-3"
    assert report_name([*sweep, "experiment.best_over=optimizer.lr"]) == f"{report_name(sweep)}-best_over-optimizer.lr"
    assert "/" not in report_name(["model/connection=dca,mhc"])


def test_names_that_are_too_long_or_ambiguous_end_in_a_hash() -> None:
    here, there = (run_name(["data=local", f"data.source={folder}/texts"]) for folder in ("/here", "/there"))
    assert here.startswith("vanilla-tiny-seed1-local-source-texts-")
    assert len({here, there}) == 2
    long = [f"data.validation.v{number}.source=texts" for number in range(9)]
    names = {run_name(long[:count]) for count in range(10)}
    assert len(names) == 10
    assert max(map(len, names)) <= LONGEST
    assert run_name([f"data.source={'a' * 300}b"]) != run_name([f"data.source={'a' * 300}c"])


@given(st.lists(st.tuples(st.sampled_from(["0.1", "0.2"]), st.text(max_size=80)), min_size=2, max_size=2, unique=True))
def test_different_settings_have_different_names(settings: list[tuple[str, str]]) -> None:
    names = {run_name([f"optimizer.lr={lr}", f"data.source={source}"]) for lr, source in settings}
    assert len(names) == 2
    assert all(len(name) <= LONGEST and "/" not in name and name.isprintable() for name in names)


def test_every_key_has_a_short_name_of_its_own() -> None:
    short = {short_key(name) for name in keys()}
    assert len(short) == len(keys())
    wanted = {"optimizer.lr": "lr", "training.max_steps": "max_steps", "data.source": "source", "size.lr": "size.lr"}
    assert {name: short_key(name) for name in wanted} == wanted
    assert short_key("model.connection.n") == "connection.n"


def test_settings_have_short_texts() -> None:
    given = {"optimizer": "muon", "optimizer.lr": "1e-3", "data.source": "/a/b/"}
    assert [setting_text(name, value) for name, value in given.items()] == ["muon", "lr 1e-3", "source b"]
    same_end = setting_texts("data.source", ["/a/b", "/c/b"])
    assert same_end == {"/a/b": "source /a/b", "/c/b": "source /c/b"}


def test_different_overrides_have_different_names_and_spellings_have_one() -> None:
    for first, second in (
        ("data=lm1b", "backbone=lm1b"),
        ("data.revision=1.1", "data.revision=1.10"),
        ("data.suffixes=[a,b]", "data.suffixes=[a-b]"),
        ("model.connection.n=2", "model.attention.n=2"),
    ):
        assert run_name([first]) != run_name([second])
    for spelling, text in (("model='mhc'", "model=mhc"), ('seed="2"', "seed=2"), ("data.name='abc'", "data.name=abc"),
                           ("++size.tied_embeddings=True", "size.tied_embeddings=true")):  # fmt: skip
        assert run_name([spelling]) == run_name([text])


def test_a_number_has_the_same_text_in_every_spelling() -> None:
    for text, spellings in {
        "1e-3": ("0.001", "1e-3", "1E-03", "0.0010", "1.0e-3"),
        "0.1": ("0.1", "1e-1", "0.10", ".1"),
        "3e-5": ("3e-05", "0.00003"),
        "-2.5": ("-2.5",),
        "100000": ("1e5", "1e+5", "100000"),
        "10B": ("10B", "10_000_000_000", "10000M"),
        "10000": ("10k", "10000"),
        "1": ("1.0",),
    }.items():
        assert {normal_value("optimizer.lr", value) for value in spellings} == {text}
        assert len({run_name([f"optimizer.lr={value}", "data.source=/a/b"]) for value in spellings}) == 1


@pytest.mark.parametrize(
    ("overrides", "current", "earlier"),
    [
        (["seed=2", "model=mhc", "experiment=mine/it"], "mine/it/mhc-tiny-seed2", "mine/it/model-mhc__seed-2"),
        # named by its defaults
        (["optimizer.lr=3e-3"], "default/vanilla-tiny-seed1", "default/vanilla-tiny-seed1-lr3e-3"),
    ],
)
def test_a_run_of_an_earlier_rule_keeps_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], current: str, earlier: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_directory(overrides, DEFAULTS) == f"outputs/{current}"
    Path("outputs", earlier).mkdir(parents=True)
    assert run_directory(overrides, DEFAULTS) == f"outputs/{earlier}"
    Path("outputs", current).mkdir()
    assert run_directory(overrides, DEFAULTS) == f"outputs/{current}"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["optimizer.lr=3e-3", "training.sequence_length=256", "training.max_steps=600"], "vanilla-tiny-seed1"),
        (["optimizer.betas=[0.9,0.95]", "optimizer=adamw", "budget=paper"], "vanilla-tiny-seed1"),
        (["size=micro", "optimizer.lr=3e-3", "training.sequence_length=256"], "vanilla-micro-seed1-sequence_length256"),
        (["model=mhc", "model.connection.num_streams=4", "optimizer.lr=1e-3"], "mhc-tiny-seed1-lr1e-3"),
        # the default only where another override is
        (["size.lr=1e-3", "optimizer.lr=3e-3"], "vanilla-tiny-seed1-lr3e-3-size.lr1e-3"),
        # a budget does not change what is given, and a tokenizer no given vocabulary
        (["budget=smoke", "training.batch_size=8", "seed=1"], "vanilla-tiny-seed1-batch_size8-smoke"),
        (["size.vocab_size=2048"], "vanilla-tiny-seed1-size.vocab_size2048"),
    ],
)
def test_a_directory_omits_overrides_that_set_the_default(overrides: list[str], name: str) -> None:
    assert run_directory(overrides, DEFAULTS) == run_directory(overrides[::-1], DEFAULTS) == f"outputs/default/{name}"
    assert sweep_points(overrides)[0].directory == f"outputs/default/{name}"


def test_runs_of_the_same_directory_have_the_same_configuration() -> None:
    overrides = ["model=mhc", "optimizer.lr=3e-3", "schedule.warmup_ratio=0.05", "model.connection.num_streams=4"]
    here, there = compose_anywhere(overrides), compose_anywhere(overrides[:1])
    assert here.output_dir == there.output_dir
    assert not compare(asdict(there), asdict(here))


def test_what_the_points_of_an_experiment_set_is_named() -> None:
    points = sweep_points(["experiment=depthlm/sensitivity_rate", "optimizer.betas=[0.9,0.95]"])
    folders = [Path(point.directory).name for point in points]
    assert "vanilla-nano_160k-seed1-lr0.017" in folders
    assert not any("betas" in folder for folder in folders)


def test_a_run_may_be_named() -> None:
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


def test_the_experiment_sets_what_the_overrides_do_not() -> None:
    assert leading(depthlm.compose()) == DEFAULTS
    assert run_name(["seed=3"], Leading("moda", "moda_700m", "1")) == "moda-moda_700m-seed3"
