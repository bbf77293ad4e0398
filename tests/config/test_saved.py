"""The classes that a saved configuration names, and its comparison with another one."""

import json
import re
from dataclasses import asdict
from typing import Any

import pytest

from depthlm.config.arguments import read_arguments
from depthlm.config.from_run import trusted
from depthlm.config.saved import check_trusted, compare
from depthlm.errors import UserError
from depthlm.evaluation.evaluate import Evaluate
from depthlm.optimizers import Optimizer


def test_a_class_without_a_module_is_reported_as_damage() -> None:
    with pytest.raises(UserError, match=r"run: model\.connection\._target_ names no class \(None\)"):
        check_trusted({"model.connection": "None"}, (), "run")


def test_only_modules_of_depthlm_and_trusted_ones_are_imported() -> None:
    check_trusted(
        {
            "model.connection": "depthlm.mechanisms.residual.Residual",
            "model.attention": "mine.part.A",
            "optimizer": "torch.optim.SGD",
        },
        ["mine"],
        "",
    )
    for target in ("depthlm_too.A", "mine.A", "torch.hub.load"):
        with pytest.raises(UserError, match="Loading the run imports that code"):
            check_trusted({"optimizer": target}, ["min"], "run")


def test_the_hint_on_trust_works_as_printed() -> None:
    saved = {"model.connection": "mine.part.A", "model.attention": "theirs.B", "optimizer": "torch.optim.SGD"}
    with pytest.raises(UserError) as refused:
        check_trusted(saved, ["earlier"], "outputs/a")
    assert str(refused.value) == (
        "outputs/a: model.connection is from mine.part, model.attention is from theirs. Loading the run imports that "
        "code; if you trust it, add trust=earlier,mine.part,theirs "
        '(in Python, trust=["earlier", "mine.part", "theirs"])'
    )
    (hint,) = re.findall(r"add (trust=\S+)", str(refused.value))
    (in_python,) = re.findall(r"in Python, trust=(.*)\)", str(refused.value))
    names = read_arguments(Evaluate, ["run=outputs/a", hint]).trust
    assert names == trusted([hint]) == json.loads(in_python)
    check_trusted(saved, names or (), "outputs/a")


def test_a_run_of_an_older_version_has_the_defaults_of_newer_keys() -> None:
    grn = {"_target_": "depthlm.mechanisms.dca.DeepCrossAttention", "version": 3}
    now = {"size": {"num_experts": 8}, "model": {"connection": {**grn, "own_embedding": True, "last_k": 2}}}
    older = {"size": {}, "model": {"connection": {**grn, "last_k": 2}}}
    assert compare(older, now) == {}
    now["size"]["num_experts"] = 16
    now["model"]["connection"]["own_embedding"] = False
    assert compare(older, now) == {
        "size.num_experts": "the run has 8, this command gives 16",
        "model.connection.own_embedding": "the run has True, this command gives False",
    }
    # a key that the command lacks is a difference
    assert list(compare(now, older)) == ["model.connection.own_embedding", "size.num_experts"]


def test_a_run_of_an_older_version_has_the_defaults_of_a_newer_section() -> None:
    now: dict[str, Any] = {"optimizer": asdict(Optimizer())}
    older = {"optimizer": {name: value for name, value in now["optimizer"].items() if name != "groups"}}
    assert compare(older, now) == {}
    now["optimizer"]["groups"]["matrix"]["lr_scale"] = 0.5
    assert compare(older, now) == {"optimizer.groups.matrix.lr_scale": "the run has 1.0, this command gives 0.5"}


def test_a_value_of_an_earlier_version_equals_what_it_is_called_now() -> None:
    target = {"_target_": "depthlm.mechanisms.attention_residuals.AttentionResiduals"}

    def with_key_norm(value: object) -> dict[str, object]:
        return {"model": {"connection": {**target, "key_norm": value}}}

    assert compare(with_key_norm(True), with_key_norm("weighted")) == {}
    assert compare(with_key_norm(False), with_key_norm("none")) == {}
    assert compare(with_key_norm(True), with_key_norm("none")).keys() == {"model.connection.key_norm"}
