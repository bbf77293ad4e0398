"""A mechanism has one name: of its preset, file, class, operator, golden file, heading and pictures."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import depthlm
from depthlm.config import compose
from depthlm.inspect import collect
from depthlm.locations import CONF, REPOSITORY

from ..options import option, parts_of

PRESETS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
OPTIONS = [
    (kind, path.stem) for kind in ("connection", "attention") for path in sorted((CONF / "model" / kind).glob("*.yaml"))
]
# those of vanilla
PLAIN = {"residual", "self_attention"}
HEADINGS = re.findall(r"^### (.*)$", (REPOSITORY / "docs/mechanisms.md").read_text(), re.MULTILINE)


def mechanism_of(preset: str) -> str:
    """Return the option that replaces one of vanilla; a preset of another name only has other settings."""
    (name,) = ({*parts_of(preset).values()} - PLAIN) or {"residual"}
    return name


def matches(name: str, class_name: str) -> bool:
    """Return whether a class has this name: in CamelCase, or as the initials of its words."""
    return class_name.lower() == name.replace("_", "") or "".join(re.findall("[A-Z]", class_name)).lower() == name


def test_an_option_names_its_file_and_class():
    for kind, name in OPTIONS:
        module, _, class_name = option(f"model/{kind}", name)["_target_"].rpartition(".")
        assert module == f"depthlm.mechanisms.{name}" or name == "self_attention"
        assert matches(name, class_name), name
        assert name in PLAIN or name in HEADINGS


def test_a_preset_shares_the_name_of_its_mechanism():
    for preset in PRESETS:
        settings, name = option("model", preset), mechanism_of(preset)
        assert settings["name"] == preset
        assert (REPOSITORY / f"tests/training/golden/{preset}.json").is_file()
        assert preset in (name, "vanilla") or settings.keys() & {"connection", "attention"}, preset


def test_the_folders_of_operators_are_named_as_mechanisms():
    folders = {path.parent.name for path in (REPOSITORY / "depthlm/ops").glob("*/__init__.py")}
    mixers = {"kimi_delta", "cross_entropy"}
    assert folders - mixers < {name for _, name in OPTIONS}
    for name in folders - mixers:
        module = importlib.import_module(f"depthlm.mechanisms.{name}")
        assert f"depthlm.ops.{name}." in inspect.getsource(module)


# one of each mechanism
@pytest.mark.parametrize("preset", {mechanism_of(preset): preset for preset in reversed(PRESETS)}.values())
def test_pictures_begin_with_the_name(preset):
    config = compose([f"model={preset}", "size=micro"], here=False)
    pictures: list[Any] = collect(depthlm.build_model(config), [torch.zeros(1, 8, dtype=torch.long)])[0]
    assert all(picture.name.startswith(f"{mechanism_of(preset)}_") for picture in pictures)
    assert bool(pictures) == (preset != "vanilla")


def test_the_page_is_ordered_as_the_folder():
    files = sorted(path.stem for path in Path(REPOSITORY, "depthlm/mechanisms").glob("[a-z]*.py"))
    assert [name for name in files if name not in PLAIN] == HEADINGS


def test_no_file_of_the_model_knows_a_mechanism():
    for path in Path(REPOSITORY, "depthlm/model").rglob("*.py"):
        assert "depthlm.mechanisms" not in path.read_text(), path
