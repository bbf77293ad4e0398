"""The classes that a saved configuration names."""

import pytest

from depthlm.config.saved import check_trusted
from depthlm.errors import UserError


def test_a_class_without_a_module_is_reported_as_damage() -> None:
    with pytest.raises(UserError, match=r"run: model\.connection\._target_ names no class \(None\)"):
        check_trusted({"connection": "None"}, (), "run")


def test_only_modules_of_depthlm_and_trusted_ones_are_imported() -> None:
    check_trusted(
        {"connection": "depthlm.model.connections.residual.Residual", "attention": "mine.part.A"}, ["mine"], ""
    )
    for target in ("depthlm_too.A", "mine.A"):
        with pytest.raises(UserError, match="name that module in trust="):
            check_trusted({"attention": target}, ["min"], "run")
