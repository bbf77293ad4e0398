"""Settings that reach beyond a run are taken from the user's own runs only."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import depthlm
from depthlm.config import compose, saved
from depthlm.config.arguments import read_arguments
from depthlm.config.keys import flatten, keys, replace_values
from depthlm.config.saved import is_own, load_config, signed_config_text
from depthlm.counts import Count
from depthlm.errors import UserError
from depthlm.evaluation.evaluate import Evaluate, evaluate
from depthlm.inspect import Inspect, inspect_run

from ..hugging_face.conftest import make_run

__all__ = ["make_run"]

MakeRun = Callable[..., Path]
# what neither names a place nor is imported: names in reports, numbers, and arguments of classes of torch and depthlm
HARMLESS = {
    "name", "model.name", "backbone.name", "size.name", "size.paper", "data.name", "data.license", "optimizer.name",
    "budget.name", "data.subset", "data.revision", "data.split", "data.validation_split", "data.suffixes",
    "data.text_field", "data.end_of_text", "optimizer.settings",
    "training.activation_checkpointing", "training.sample", "parametrization.base_size", "differences", "code",
    # the user names the run directory, and a new one is beside it
    "output_dir",
}  # fmt: skip
CLASSES = {"model.connection", "model.attention", "optimizer._target_"}


@pytest.fixture
def other_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Let this process become another user, with a key of its own."""

    def become() -> None:
        saved._key.cache_clear()
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))

    yield become
    saved._key.cache_clear()


@pytest.fixture
def run(make_run: MakeRun, tmp_path: Path) -> Path:
    """A run of this user with settings that name places."""
    run = make_run(
        f"data.source={tmp_path}/text", "data.tokenizer=bytes", "tracker=wandb", "tracker.entity=somebody",
        f"data.validation.more.source={tmp_path}/more",
    )  # fmt: skip
    sign(run, evaluation={"every": 100, "tasks": [f"{tmp_path}/task.yaml"]})
    return run


def sign(run: Path, **changes: dict) -> None:
    config = depthlm.load(run)[1]
    config = replace_values(config, flatten(changes))
    (run / "config.yaml").write_text(signed_config_text(config))


def test_every_text_in_the_schema_is_declared_to_reach_beyond_the_run_or_not():
    free = {
        name
        for name, key in keys().items()
        if not key.choices and key.plain_type is not Count and not name.startswith("experiment.")
        and key.plain_type not in (int, float, bool, list[int], list[float])
    }  # fmt: skip
    outside = {name for name, key in keys().items() if key.metadata["outside"]}
    assert free - outside == HARMLESS | CLASSES | {"data.sources", "data.validation"}


def test_the_user_who_trained_a_run_needs_no_trust(run, other_user):
    assert is_own(run)
    assert compose([f"run={run}", "optimizer.lr=1e-3"], here=False).tracker.entity == "somebody"
    assert not (run.parent / "other").exists()
    other_user()
    assert not is_own(run)
    # another user can read it
    assert load_config(run).tracker.entity == "somebody"


def refused(run: Path, *overrides: str) -> set[str]:
    with pytest.raises(UserError, match="you did not train this run") as caught:
        depthlm.compose([f"run={run}", *overrides])
    return {line.strip().removeprefix("- ").partition(":")[0] for line in str(caught.value).splitlines()[1:-1]}


def test_what_the_run_of_somebody_else_names_is_refused_until_it_is_given_or_trusted(run, tmp_path, other_user):
    other_user()
    names = {"data.source", "data.validation.more.source", "tracker.entity", "evaluation.tasks"}
    assert refused(run) == refused(run, "optimizer.lr=1e-3") == refused(run, "trust=torch") == names
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/a.txt").write_text("a text")
    mine = f"{tmp_path}/mine"
    given = [f"data.source={mine}", f"data.validation.more.source={mine}", "evaluation.tasks=[python_words]"]
    assert refused(run, *given) == {"tracker.entity"}
    # a mapping replaces its own keys alone
    assert refused(run, "evaluation={limit: 3}", "tracker={tensorboard: true}") == names
    assert refused(run, "evaluation={tasks: [python_words]}") == names - {"evaluation.tasks"}
    assert refused(run, "~data.validation.more") == names - {"data.validation.more.source"}
    config = depthlm.compose([f"run={run}", *given, "tracker=none", "training.max_steps=10"])
    assert (config.data.source, config.tracker.entity) == (mine, None)
    # without checks of this machine, nothing reaches beyond the run
    assert compose([f"run={run}"], here=False).tracker.entity == "somebody"
    assert refused(run, "trust=[torch]") == names
    with pytest.raises(UserError) as caught:
        depthlm.compose([f"run={run}", "trust=[torch,run]"])
    assert "you did not train this run" not in str(caught.value)


def test_a_signature_holds_for_its_own_text_only_and_needs_a_place_for_the_key(run, tmp_path, monkeypatch):
    file = run / "config.yaml"
    text = file.read_text()
    head, _, rest = text.partition("\n")
    changed = rest.replace("somebody", "intruder")
    for forged in (changed, f"{head}\n{changed}"):
        file.write_text(forged)
        assert not is_own(run)

    file.write_text(text)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    saved._key.cache_clear()
    sign(run)
    saved._key.cache_clear()
    assert "signed" not in file.read_text()
    assert load_config(run).tracker.entity == "somebody"
    assert not is_own(run)


def test_evaluate_and_inspect_use_no_place_that_somebody_else_has_named(run, tmp_path, other_user, monkeypatch):
    monkeypatch.setattr("depthlm.evaluation.evaluate.measure_sets", lambda *_: {"validation/x/loss": 1.0})
    monkeypatch.setattr("depthlm.evaluation.evaluate.run_sets", lambda *_: [])
    monkeypatch.setattr("depthlm.evaluation.evaluate.folder_sets", lambda *_: [])
    other_user()
    for command in (
        lambda: evaluate(read_arguments(Evaluate, [f"run={run}"])),
        lambda: inspect_run(read_arguments(Inspect, [f"run={run}", f"to={tmp_path}/pictures"])),
    ):
        with pytest.raises(UserError, match=r"(?s)you did not train this run.*data\.source"):
            command()
    evaluate(read_arguments(Evaluate, [f"run={run}", f"sets={tmp_path}"]))
    evaluate(read_arguments(Evaluate, [f"run={run}", "trust=run"]))
    assert json.loads((run / "evaluation.json").read_text())["validation/x/loss"] == 1.0
