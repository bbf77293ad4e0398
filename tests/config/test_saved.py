"""The classes that a saved configuration names."""

import pytest

from depthlm.config.saved import check_trusted
from depthlm.errors import UserError


def test_a_class_without_a_module_is_reported_as_damage() -> None:
    with pytest.raises(UserError, match=r"run: model\.connection\._target_ names no class \(None\)"):
        check_trusted({"model.connection": "None"}, (), "run")


def test_only_modules_of_depthlm_and_trusted_ones_are_imported() -> None:
    check_trusted(
        {
            "model.connection": "depthlm.model.connections.residual.Residual",
            "model.attention": "mine.part.A",
            "optimizer": "torch.optim.SGD",
        },
        ["mine"],
        "",
    )
    for target in ("depthlm_too.A", "mine.A", "torch.hub.load"):
        with pytest.raises(UserError, match="name that module in trust="):
            check_trusted({"optimizer": target}, ["min"], "run")
