"""Names of older versions are still read."""

import dataclasses
from typing import Any

import pytest

import depthlm
from depthlm.config import ConfigError
from depthlm.config.renamed import use_new_names


def test_an_old_key_sets_the_new_one() -> None:
    config = depthlm.compose(["size=micro", "training.on_bad_numbers=stop"])
    assert (config.training.on_nonfinite, config.training.on_bad_numbers) == ("stop", None)
    with pytest.raises(ConfigError, match="init_from=/nowhere: no checkpoint in it"):
        depthlm.compose(["size=micro", "import_from=/nowhere"])


def test_an_old_key_beside_the_new_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.on_bad_numbers: the old name of training\.on_nonfinite"):
        depthlm.compose(["size=micro", "training.on_bad_numbers=stop", "training.on_nonfinite=skip"])


def test_the_names_in_a_saved_configuration_become_the_new_ones() -> None:
    saved: dict[str, Any] = {
        "import_from": "a/run",
        "training": {"on_bad_numbers": "rewind"},
        "model": {"connection": {"_target_": "depthlm.model.connections.cross_attention.GRN", "version": 3}},
    }
    use_new_names(saved)
    assert (saved["init_from"], saved["import_from"]) == ("a/run", None)
    assert saved["training"] == {"on_bad_numbers": None, "on_nonfinite": "rewind"}
    assert saved["model"]["connection"] == {"_target_": "depthlm.mechanisms.dca.DeepCrossAttention", "version": 3}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_optimizer_saved_without_its_class_is_the_same_optimizer(name: str) -> None:
    current = dataclasses.asdict(depthlm.compose([f"optimizer={name}"], here=False).optimizer)
    # what earlier versions saved for either optimizer
    older = {key: value for key, value in current.items() if key not in ("_target_", "settings")}
    saved: dict[str, Any] = {"optimizer": older | {"momentum": 0.95, "ns_steps": 5}}
    use_new_names(saved)
    assert saved["optimizer"] == current


@pytest.mark.parametrize(("name", "expected"), [("wandb", True), ("none", False)])
def test_the_tracker_of_an_older_run_is_read(name: str, expected: bool) -> None:
    saved: dict[str, Any] = {"tracker": {"name": name, "mode": "offline"}}
    use_new_names(saved)
    assert saved["tracker"] == {"wandb": expected, "mode": "offline"}


@pytest.mark.parametrize(
    "broken", [{"model": 3}, {"model": {"connection": None}}, {"training": []}, {"optimizer": {"name": []}}, {}]
)
def test_a_broken_configuration_is_left_to_the_checks(broken: dict[str, Any]) -> None:
    before = dict(broken)
    use_new_names(broken)
    assert broken == before
