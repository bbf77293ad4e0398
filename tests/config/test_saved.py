"""The classes that a saved configuration names, and its comparison with another one."""

import importlib
import json
import re
from dataclasses import asdict
from typing import Any

import pytest
import yaml

import depthlm
from depthlm.config import ConfigError
from depthlm.config.arguments import read_arguments
from depthlm.config.classes import check_trusted
from depthlm.config.from_run import read_sources
from depthlm.config.saved import compare, load_config, signed_config_text
from depthlm.errors import UserError
from depthlm.evaluation.evaluate import Evaluate
from depthlm.files import read_yaml
from depthlm.optimizers import Optimizer
from depthlm.runs.directory import check_run_directory

from ..options import configuration


def test_only_modules_of_depthlm_and_trusted_ones_are_imported():
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
    with pytest.raises(UserError, match=r"run: model\.connection\._target_ names no class \(None\)"):
        check_trusted({"model.connection": "None"}, (), "run")


def test_comparing_configurations_imports_no_class(tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    named = {"model": {"connection": {"_target_": "theirs.C"}}}
    with_more = {"model": {"connection": {"_target_": "theirs.C", "n": 1}}}
    assert compare(named, with_more) == {"model.connection.n": "the run has None, this command gives 1"}


@pytest.mark.parametrize("text", ["seed: !!bool x", "seed: !!int ''", "seed: !!python/object/apply:pathlib.Path [a]"])
def test_a_configuration_with_a_tag_is_refused(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml cannot be read \(the tag tag:yaml.org,2002:"):
        load_config(tmp_path)
    assert read_yaml(tmp_path / "config.yaml") == {}


def test_the_hint_on_trust_works_as_printed():
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
    assert names == read_sources([hint]).trust == json.loads(in_python)
    check_trusted(saved, names or (), "outputs/a")


def test_a_run_of_an_older_version_has_the_defaults_of_newer_keys():
    grn = {"_target_": "depthlm.mechanisms.dca.DeepCrossAttention", "version": 3}
    connection = {**grn, "own_embedding": True, "last_k": 2}
    now: dict[str, Any] = {"size": {"num_experts": 8}, "model": {"connection": connection}}
    older: dict[str, Any] = {"size": {}, "model": {"connection": {**grn, "last_k": 2}}}
    assert compare(older, now) == {}
    now["size"]["num_experts"] = 16
    now["model"]["connection"]["own_embedding"] = False
    assert compare(older, now) == {
        "size.num_experts": "the run has 8, this command gives 16",
        "model.connection.own_embedding": "the run has True, this command gives False",
    }
    # a key that the command lacks is a difference
    assert list(compare(now, older)) == ["model.connection.own_embedding", "size.num_experts"]
    # and of a newer section
    now = {"optimizer": asdict(Optimizer())}
    older = {"optimizer": {name: value for name, value in now["optimizer"].items() if name != "groups"}}
    assert compare(older, now) == {}
    now["optimizer"]["groups"]["matrix"]["lr_scale"] = 0.5
    assert compare(older, now) == {"optimizer.groups.matrix.lr_scale": "the run has 1.0, this command gives 0.5"}


@pytest.mark.parametrize(("stage", "kept"), [(0, True), (1, False)])
def test_a_bf16_run_of_an_older_version_keeps_its_residual_stream_in_fp32_at_zero_0(tmp_path, stage, kept):
    config = asdict(configuration("precision=bf16", f"deepspeed.stage={stage}"))
    now = config | {"precision": config["precision"] | {"fp32_residual": kept}}
    earlier = config | {"precision": {k: v for k, v in config["precision"].items() if k != "fp32_residual"}}
    earlier["experiment"] = config["experiment"] | {"best_over": []}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(earlier))
    assert load_config(tmp_path).precision.fp32_residual == kept
    assert load_config(tmp_path).experiment.best_over is None
    assert compare(earlier, now) == {}
    assert ("precision.fp32_residual" in compare(earlier, config)) == kept


OWN = {
    "own_depth/__init__.py": "",
    "own_depth/mine.py": """import json

import own_library
from depthlm.mechanisms.residual import Residual

from .parts import SCALE


class Mine(Residual):
    def read_scaled(self, x):
        import own_helper

        return own_helper.scale(x) * SCALE
""",
    "own_depth/parts.py": "from . import constants\nSCALE = constants.ONE\n",
    "own_depth/constants.py": "ONE = 1\n",
    "own_depth/unrelated.py": "import own_depth.mine\n",
    "own_helper.py": "def scale(x): return x\n",
}


def test_changed_code_of_a_class_or_of_what_it_imports_is_another_run(tmp_path, monkeypatch):
    for name, text in OWN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    # a virtual environment inside the folder, whose packages have versions instead
    installed = tmp_path / ".venv/site-packages"
    installed.mkdir(parents=True)
    (installed / "own_library.py").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(installed))
    monkeypatch.syspath_prepend(installed)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    target = "own_depth.mine.Mine"
    overrides = ["size=micro", f"model.connection._target_={target}", f"output_dir={tmp_path}/run"]
    config = depthlm.compose(overrides)
    assert config.code.keys() == {target}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(signed_config_text(config))
    (tmp_path / "run/.saved").touch()
    assert check_run_directory(config) is None
    for name, text in OWN.items():
        (tmp_path / name).write_text(f"{text}# changed\n")
        changed = depthlm.compose(overrides)
        if "unrelated" in name:
            assert changed.code == config.code
        else:
            with pytest.raises(
                UserError, match=rf"code\.{target}: the run has {config.code[target]}, this command"
            ) as error:
                check_run_directory(changed)
            assert changed.code[target] in str(error.value)
            assert "Restore the code of these classes" in str(error.value)
        (tmp_path / name).write_text(text)
    (installed / "own_library.py").write_text("# another version\n")
    assert depthlm.compose(overrides).code == config.code
    # another class is a difference by its name
    assert compare({"code": {}}, {"code": config.code}) == compare({}, {"code": config.code}) == {}


def test_classes_of_installed_packages_have_no_digest_and_none_can_be_given():
    assert depthlm.compose(["size=micro", "optimizer._target_=torch.optim.SGD"]).code == {}
    with pytest.raises(ConfigError, match=r"code\.a=\.\.\.: is computed; leave it out"):
        depthlm.compose(["size=micro", "+code.a=1"])


def test_keys_without_an_effect_are_left_out_of_the_configuration_of_a_run(tmp_path):
    config = asdict(configuration("size=micro"))
    tracker = config["tracker"] | {"trackio": False, "artifacts": "none", "space": None}
    earlier = config | {"tracker": tracker, "model": config["model"] | {"kept_sources": {}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(earlier))
    assert asdict(load_config(tmp_path)) == config
    assert compare(earlier, config) == {}
    earlier["model"]["kept_sources"] = {"final": [[0]]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(earlier))
    with pytest.raises(UserError, match=r"model\.kept_sources.*no such key"):
        load_config(tmp_path)
