"""`run=<directory>`: the configuration of an existing run with overrides on top, without training."""

import dataclasses
import functools
import sys
from pathlib import Path

import pytest

import depthlm
from depthlm.commands.train import read_command_line
from depthlm.config import Config, ConfigError, changes, compose
from depthlm.config.saved import config_text
from depthlm.errors import UserError
from depthlm.sweeps import check_points, sweep_points

BASE = "outputs/default/vanilla-tiny-seed1"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()


@functools.cache
def composed(*overrides: str) -> Config:
    """Compose overrides that several tests start from. The tests do not change the configuration."""
    return compose([*overrides, f"output_dir={BASE}"], here=False)


def save(directory: str, *overrides: str, config_dir: str | None = None) -> Config:
    """Write the config.yaml of a run with these overrides, as training would."""
    if config_dir is None:
        config = dataclasses.replace(composed(*overrides), output_dir=directory)
    else:
        config = compose([*overrides, f"output_dir={directory}"], config_dir, here=False)
    Path(directory).mkdir(parents=True)
    (Path(directory) / "config.yaml").write_text(config_text(config))
    return config


def from_run(*overrides: str, run: str = BASE) -> Config:
    return compose([f"run={run}", *overrides], here=False)


def without_place(config: Config) -> dict[str, object]:
    return dataclasses.asdict(dataclasses.replace(config, output_dir=None, differences={}))


def mistakes(*overrides: str, run: str = BASE) -> list[str]:
    with pytest.raises(ConfigError) as error:
        from_run(*overrides, run=run)
    return error.value.errors


MIXTURE = (
    "data.sources.a.source=texts", "data.sources.a.weight=1", "data.sources.b.source=texts", "data.sources.b.weight=2",
    "data.validation.v.source=texts",
)  # fmt: skip


@pytest.mark.parametrize(
    "overrides",
    [
        ("size=1.5b", "data=fineweb_edu", "deepspeed=zero1", "schedule=wsd", "schedule.warmup_steps=10"),
        ("model/attention=depth_attention", "model/connection=mhc", "model.loops=2", "optimizer=muon"),
        MIXTURE,
    ],
    ids=lambda overrides: " ".join(overrides)[:40],
)
def test_without_overrides_the_configuration_is_that_of_the_run(overrides):
    saved = save(BASE, *overrides)
    assert from_run() == saved


def test_a_budget_is_not_applied_again():
    point = sweep_points(["experiment=dca/related_work", "budget=smoke"])[-1]
    saved = save("outputs/point", *point.checkable())
    assert from_run(run="outputs/point") == saved
    longer = from_run("training.max_steps=777", run="outputs/point")
    training = dataclasses.replace(saved.training, max_steps=777, max_tokens=None, max_epochs=None)
    assert without_place(longer) == without_place(dataclasses.replace(saved, training=training))


def test_overrides_have_the_same_effect_on_a_run_as_from_scratch():
    own = ("size=micro", "data.vocab_size=4096", "training.batch_size=4", "training.sequence_length=64")
    save(BASE, *own)
    for overrides in (
        ("model=moda", "model/connection=mhc", "model.loops=2", "training.max_tokens=1M"),
        ("schedule=wsd", "schedule.decay_ratio=0.3", "data=local", "data.source=texts"),
        MIXTURE,
    ):
        assert without_place(from_run(*overrides)) == without_place(compose([*own, *overrides], here=False)), overrides


def test_an_override_of_a_mixture_changes_only_its_key():
    saved = save(BASE, *MIXTURE)
    config = from_run("data.sources.a.weight=3", "data.validation.w.source=texts")
    assert (config.data.sources["a"].weight, config.data.sources["a"].source) == (3.0, "texts")
    assert config.data.sources["b"] == saved.data.sources["b"]
    assert list(config.data.validation) == ["v", "w"]


@pytest.mark.parametrize("override", ["training.batch_size=8", "training.batch_tokens=4096"])
def test_batch_size_and_batch_tokens_replace_each_other(override):
    save(BASE, "training.batch_tokens=65536", "training.sequence_length=512")
    assert from_run(override).training.batch_size == 8
    assert from_run("training.sequence_length=1024").training.batch_size == 64


def test_settings_of_a_single_invocation_are_not_inherited():
    save(
        BASE, "resume=never", "dry_run=true", "training.max_steps=9", "training.stop_after=3", "training.profile=true",
        "training.log_every=4", "training.keep_last=7",
    )  # fmt: skip
    config = from_run()
    assert (config.resume, config.dry_run, config.training.stop_after, config.training.profile) == (
        "auto", False, None, False,
    )  # fmt: skip
    assert (config.training.log_every, config.training.keep_last, config.output_dir) == (4, 7, BASE)


def test_overrides_that_affect_the_result_give_a_new_run_directory():
    save(BASE)
    for text, directory in {
        "training.log_every=3 tracker=[wandb,tensorboard] resume=never": BASE,
        "deepspeed=zero2 kernels=torch training.micro_batch_size=2": BASE,
        # the same values as in the run
        "model=vanilla seed=1 optimizer.betas=[0.9,0.95]": BASE,
        "training.max_tokens=9M resume=extend": BASE,
        "training.max_steps=900": f"{BASE}+max_steps900",
        "training.max_steps=900 resume=extend seed=2": f"{BASE}+max_steps900-seed2",
        "++seed=2 optimizer.lr=0.1 tracker=none": f"{BASE}+lr0.1-seed2",
        "seed=2 output_dir=elsewhere/${model.name}-${seed}": "elsewhere/vanilla-2",
        "output_dir=elsewhere": "elsewhere",
        "seed=2 output_dir=null": f"{BASE}+seed2",
        "output_dir=null": BASE,
    }.items():
        assert from_run(*text.split()).output_dir == directory, text


def test_a_derived_run_never_has_the_directory_of_a_direct_one():
    own = ("model=mhc", "size=micro", "model.connection.num_streams=2", "training.max_steps=40")
    origin = str(compose(own, here=False).output_dir)
    saved = save(origin, *own)
    for text, name in {
        # the rate and the length of a sequence stay those of micro
        "size=1.5b": "1.5b",
        "training.max_tokens=2M": "max_tokens2M",
        "training.max_tokens=null optimizer.lr=0.5": "lr0.5",
        "optimizer=muon optimizer.lr=5e-3": "muon-lr5e-3",
        "model/connection=hyper_connections": "connection-hyper_connections",
        "seed=2 size.num_layers=3": "num_layers3-seed2",
    }.items():
        derived = from_run(*text.split(), run=origin)
        assert derived.output_dir == f"{origin}+{name}", text
        assert derived.differences.keys() >= saved.differences.keys()
    again = save(f"{origin}+seed2", *own, "seed=2")
    assert from_run("optimizer.lr=0.5", run=str(again.output_dir)).output_dir == f"{origin}+seed2+lr0.5"


def test_changes_list_only_settings_that_affect_the_result_and_a_fork_has_a_new_directory():
    save(BASE, "training.max_steps=600")
    run = Path(BASE)
    assert changes(run, from_run("seed=2", "training.log_every=1", "kernels=torch")) == {
        "seed": "the run has 1, this command gives 2"
    }
    assert changes(run, from_run("training.max_steps=900")).keys() == {"training.max_steps"}
    assert changes(run, from_run("training.max_steps=900", "resume=extend")) == {}
    forked = from_run(f"fork_from={BASE}", "optimizer.lr=0.1")
    assert (forked.fork_from, forked.optimizer.lr) == (BASE, 0.1)
    assert forked.output_dir != BASE


def test_a_mapping_is_merged_into_the_group_of_the_run():
    save(BASE, "optimizer=muon", "schedule=wsd", "model=mhc")
    config = from_run("optimizer={lr: 0.01}", "schedule={warmup_ratio: 0.2}", "model={loops: 2}")
    assert (config.optimizer.name, config.optimizer.lr) == ("muon", 0.01)
    assert (config.schedule.name, config.schedule.warmup_ratio) == ("wsd", 0.2)
    assert (config.model.name, config.model.loops) == ("mhc", 2)
    assert from_run("+optimizer={lr: 0.1}").optimizer.name == "muon"
    (mistake,) = mistakes("training={max_tokens: 1000.5}")
    assert mistake.startswith("training.max_tokens=1000.5: must be a whole number")
    assert from_run("optimizer={lr: 0.02}").output_dir != from_run("optimizer={lr: 0.01}").output_dir


def test_all_mistakes_are_reported_together():
    save(BASE)
    given = {
        "budget=smoke": "budget=smoke: not with run=",
        "experiment=moda/variants": "experiment=moda/variants: not with run=",
        "budget.max_steps=10": "budget.max_steps=10: not with run=",
        "~seed": "~seed: a key cannot be removed",
        "seed=range(1,3)": "seed=range(1,3): several values",
        "foo": "foo: not an override",
        "size=nano": "size=nano: no such size; allowed: 1.5b",
        "schedule={min_lr: 0}": "schedule.min_lr=0: no such key; did you mean `schedule.min_lr_ratio`?",
        "tracker={}": "tracker={}: sets nothing",
        "optimizer.lr=true": "optimizer.lr=true: must be a number",
        "optimizer.rl=1": "optimizer.rl=1: no such key; did you mean `optimizer.lr`?",
        "training.max_steps=abc": "training.max_steps=abc: must be a whole number",
        "data.sources.a.weight=x": "data.sources.a.weight=x: ",
        "optimizer.eps=${nope.x}": "optimizer.eps=${nope.x}: ",
    }
    reported = mistakes(*given)
    assert [wanted for wanted in given.values() if not any(error.startswith(wanted) for error in reported)] == []


def test_run_goes_with_no_sweep_and_names_exactly_one_directory():
    save(BASE)
    with pytest.raises(ConfigError, match="run=: resumes or varies one run"):
        check_points([f"run={BASE}", "seed=1,2"])
    for overrides in (["run="], ["run=a", "run=b"]):
        with pytest.raises(UserError, match="give one run directory"):
            depthlm.compose(overrides)
    with pytest.raises(UserError, match="--info: not with run="):
        read_command_line(["--info", "config", f"run={BASE}"])
    with pytest.raises(ConfigError, match="trust"):
        depthlm.compose(["trust=my_depth"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no run in it"),
        (b"", "it has no keys"),
        (b"seed: ${oc.env:HOME}\n", "seed=${oc.env:HOME}: must be an integer"),
        (b"a: &a [1]\nb: *a\n", "cannot be read"),
        (b"[" * 5000, "cannot be read"),
        (b"of_another_version: 1\n", "of_another_version=1: no such key"),
    ],
)
def test_an_invalid_config_file_is_reported(content, message):
    Path("broken").mkdir()
    if content is not None:
        Path("broken/config.yaml").write_bytes(content)
    with pytest.raises(UserError, match="broken") as error:
        from_run(run="broken")
    assert message in str(error.value)
    assert "\n" not in str(error.value) or "cannot be read" in message


OWN = """
from depthlm.mechanisms.residual import Residual

class Mine(Residual):
    pass
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A configuration folder whose connection is in the user's own module, and a run that uses it."""
    (tmp_path / "my_depth.py").write_text(OWN)
    folder = tmp_path / "my_conf/model/connection"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("_target_: my_depth.Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    save(BASE, "model/connection=mine", config_dir="my_conf")
    return "my_conf"


def test_a_mechanism_of_the_user_is_imported_only_if_it_is_trusted_or_named(mine):
    sys.modules.pop("my_depth")
    for overrides in ([], ["trust=my_dep"], ["seed=2"]):
        with pytest.raises(UserError, match=r"model\.connection is from my_depth\. .* add trust="):
            from_run(*overrides)
    # nor to explain a mistake of what would replace it
    for text in (
        "model=mine",
        "~model",
        "model/connection=[",
        "model.connection._target_=",
        "++model.connection={n: 2}",
    ):
        with pytest.raises((UserError, ConfigError)):
            from_run(text)
    assert "my_depth" not in sys.modules
    for overrides in (["trust=[other,my_depth]"], ["trust=other", "trust=my_depth"]):
        config = from_run(*overrides)
        assert (config.model.connection["_target_"], config.output_dir) == ("my_depth.Mine", BASE)

    # a class that the command line names needs no trust
    assert from_run("model.connection._target_=my_depth.Mine").output_dir == BASE
    assert compose([f"run={BASE}", "model/connection=mine"], mine, here=False).output_dir == BASE
    assert from_run("model=dca").model.name == "dca"


def test_a_configuration_in_a_file_is_given_alone_and_is_not_that_of_a_run(tmp_path):
    config = save(BASE, "model=mhc", "optimizer.lr=0.01")
    file = tmp_path / "point.yaml"
    file.write_text(config_text(config))
    assert compose([f"config={file}"], here=False) == config
    assert compose([f"config={file}", "dry_run=true"], here=False) == dataclasses.replace(config, dry_run=True)
    with pytest.raises(ConfigError, match=r"seed=2: not with config=, which gives the whole configuration"):
        compose([f"config={file}", "seed=2"], here=False)
    with pytest.raises(UserError, match=rf"is the configuration of a run; give run={BASE}"):
        compose([f"config={BASE}/config.yaml"], here=False)
    file.write_text("seed: 1\nsize: [")
    with pytest.raises(UserError, match=r"point.yaml cannot be read"):
        compose([f"config={file}"], here=False)
    with pytest.raises(ConfigError, match="config=: trains one run"):
        check_points([f"config={file}"])
